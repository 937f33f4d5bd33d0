"""The words of `%route`, each with its line of help."""

SUBCOMMANDS = {
    "up": "boot a cluster: up [MODEL] [--roles 1P2D] [--engine cpu|mlc|attach] [--endpoint-urls URL ...]",
    "panel": "the live panel",
    "use": "make a policy active: use NAME [parameter=value ...]",
    "set": "set parameters of the active policy: set parameter=value ...",
    "undo": "go back to the policy and parameters before the last change",
    "list": "the policies that there are",
    "show": "a policy's source: show [NAME]",
    "logs": "the end of the engines' logs: logs [ENGINE] [--lines N]",
    "down": "stop the cluster",
    "help": "this list",
}

RESERVED = ("save", "add", "drain", "remove", "join", "load", "sweep")
