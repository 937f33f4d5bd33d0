"""Models as `relax.frontend.nn` modules; so far Llama's family."""
