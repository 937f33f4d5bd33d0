"""The engine with the fewest requests in flight; equals take turns.

Good where requests differ in length: a long answer keeps its engine busy, and the others take what comes meanwhile.
Source: least-connections scheduling, Linux Virtual Server, http://www.linuxvirtualserver.org/docs/scheduling.html."""


async def route(request, engines):
    return engines.all.least_loaded().complete(request)
