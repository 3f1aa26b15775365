"""The kinds of names in the tables, as `UnknownName` is given them."""

OPTION, LOADING, COMMAND, DRAFTER, POLICY, ACCEPTOR = (
    "option",
    "option of loading a target",
    "command",
    "drafter",
    "policy",
    "acceptor",
)
DTYPE, ENGINE, MODULE, RESULT = "dtype", "attribute of an Engine", "name in draftree", "attribute of a Completion"
