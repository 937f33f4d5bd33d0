"""Prefill on one engine, decode on another, so that long prompts do not make running answers stutter.

The decode engine reserves room and says how much of the prompt it holds already; the prefill engine computes the rest
and writes the KV there; the decode engine finishes the last `pd_balance_factor` of the prompt and generates.
Source: "A System for Microserving of LLMs", https://arxiv.org/abs/2412.12488; DistServe, https://arxiv.org/abs/2401.09670."""

from mlcrouter_nb import slider

pd_balance_factor = slider(0.0, 1.0, value=0.0)


async def route(request, engines):
    decode = engines.decode.least_loaded()
    prefill = engines.prefill.least_loaded(by="waiting_tokens")
    kv = await decode.prep_recv(request, end=request.kv_window_end(pd_balance_factor))
    await prefill.remote_send(request, kv)
    return decode.start_generate(request, begin=kv.end)
