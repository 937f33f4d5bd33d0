"""Each engine in its turn, whatever its load.

The oldest way to share work, and the one to measure others against: with requests of one size nothing beats it.
Source: data parallelism in "A System for Microserving of LLMs", https://arxiv.org/abs/2412.12488."""


async def route(request, engines):
    return engines.all.round_robin().complete(request)
