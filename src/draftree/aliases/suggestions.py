"""Suggestions for names of other tools that have no exact equivalent in draftree."""

from collections.abc import Mapping

from draftree.aliases.attribute_hints import (
    CONVERSATION_HINTS,
    ENGINE_HINTS,
    MODULE_HINTS,
    RESULT_HINTS,
    STATS_HINTS,
    TOKEN_HINTS,
)
from draftree.aliases.flag_hints import FLAG_HINTS, QUANTIZE_HINTS
from draftree.aliases.generation_options import OPTION_HINTS
from draftree.aliases.hint_tables import LM_EVALUATION
from draftree.aliases.load_arguments import (
    ACCEPTOR_HINTS,
    DRAFTER_HINTS,
    DTYPE_HINTS,
    LOADING_HINTS,
    POLICY_HINTS,
)
from draftree.aliases.name_kinds import (
    ACCEPTOR,
    COMMAND,
    CONVERSATION,
    DRAFTER,
    DTYPE,
    ENGINE,
    FLAG,
    LOADING,
    MODULE,
    OPTION,
    POLICY,
    QUANTIZE,
    RESULT,
    STATS,
    TOKEN,
)

_TODAY = "type draftree generate MODEL -p 'PROMPT', or draftree chat MODEL for a conversation"

_MOVED = "it is now a script of draftree's repository: python benchmarks/{}.py"
"""Hint for a command that has left the package."""

INSTEAD: Mapping[str, Mapping[str, str]] = {
    OPTION: OPTION_HINTS,
    LOADING: LOADING_HINTS,
    FLAG: FLAG_HINTS,
    COMMAND: {
        "recount": _MOVED.format("recount"),
        "analyse": _MOVED.format("analyse"),
        "analyze": _MOVED.format("analyse"),
        "tables": _MOVED.format("paper_tables"),
        "card": "draftree push writes the card; type draftree push FOLDER OWNER/NAME --dry-run",
        "eval": f"type draftree bench MODEL, or {LM_EVALUATION}",
        "pull": "models are downloaded when they are first used; `hf download ID` fetches one ahead",
        "download": "models are downloaded when they are first used; `hf download ID` fetches one ahead",
        "ps": "nothing runs in the background",
        "rm": "`hf cache` shows and removes downloaded models",
        "show": "type draftree list, or draftree drafters --for MODEL",
        "info": "type draftree list, or draftree drafters --for MODEL",
        "quantize": "type draftree generate MODEL --quantize int8",
        "profile": "type draftree generate MODEL -p 'PROMPT' --profile",
        "speculative": _TODAY,
        "lm_eval": f"run {LM_EVALUATION}",
        "evaluate": f"type draftree bench MODEL, or {LM_EVALUATION}",
        "compare": "type draftree bench MODEL, or draftree generate MODEL -p 'PROMPT' --baseline",
        "create": "type draftree train DRAFTER --target MODEL",
        "lora": "type draftree generate MODEL --adapter FOLDER",
        "fuse": "type draftree generate MODEL --adapter FOLDER",
        "cache": "`hf cache` shows and removes downloaded models",
        "cp": "copy the folder of a drafter",
        "stop": "nothing runs in the background",
        "login": "run `hf auth login`",
        "auth": "run `hf auth login`",
        "signin": "run `hf auth login`",
        "whoami": "run `hf auth whoami`",
        "manage": "`hf cache` shows and removes downloaded models",
        "repo": "type draftree push FOLDER OWNER/NAME",
        "jobs": "nothing runs in the background",
        "bench_serve": "type draftree bench MODEL",
        "run_batch": "engine.complete([PROMPT, …]) in Python answers many prompts; draftree bench only measures",
        "install": "draftree is not on PyPI yet: type pip install . in its clone",
        "tokenize": "transformers' AutoTokenizer reads the model's tokenizer",
        "embed": "draftree writes texts; transformers gives embeddings",
        "perplexity": f"run {LM_EVALUATION}",
        "plot": "type draftree report RESULT",
        "update": "type git pull and pip install . in draftree's clone",
    },
    DRAFTER: DRAFTER_HINTS,
    DTYPE: DTYPE_HINTS,
    QUANTIZE: QUANTIZE_HINTS,
    POLICY: POLICY_HINTS,
    ACCEPTOR: ACCEPTOR_HINTS,
    ENGINE: ENGINE_HINTS,
    MODULE: MODULE_HINTS,
    RESULT: RESULT_HINTS,
    TOKEN: TOKEN_HINTS,
    CONVERSATION: CONVERSATION_HINTS,
    STATS: STATS_HINTS,
}
"""Hints on how to replace names of other tools that are not accepted, by kind of name."""
