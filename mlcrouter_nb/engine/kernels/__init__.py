"""TIR kernels, parameterised by the model's shape, and the choice among them by CPU."""
