"""The provenance of a saved result: commit, versions, hardware, command, seed and target."""

import hashlib
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import draftree
from draftree.models.cpu_linear import packed_shapes
from draftree.models.fused_cpu_modules import replaced_kinds
from draftree.target.target import Target
from draftree.utils.hardware import machine


def provenance(target: Target, seed: int) -> dict[str, Any]:
    """Return the provenance of a run: commit, versions, hardware, command, seed, date, target."""
    decoder = target.decoder
    return {
        "command": command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "draftree": draftree.__version__,
        },
        "hardware": {
            **machine(decoder.device),
            "kind": decoder.device.type,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "seed": seed,
        "target": {
            "name": target.name,
            "architecture": type(decoder.model).__name__,
            "parameters": sum(p.numel() for p in decoder.model.parameters()),
            "weights": fingerprint(decoder.model),
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "context": decoder.context,
            **({"packed": packed} if (packed := packed_shapes(decoder.hf.model)) else {}),
            **({"compiled": compiled} if (compiled := decoder.native_kinds) else {}),
            **({"between": between} if (between := replaced_kinds(decoder.hf.model)) else {}),
            **({"loading": said} if (said := target.loading.explicit_options) else {}),
        },
    }


def command() -> str:
    """Return the command line of this run: that of `draftree`, or of a Python script."""
    script = Path(sys.argv[0])
    is_script = script.suffix == ".py" and script.name != "__main__.py"
    return shlex.join([*(["python", str(script)] if is_script else ["draftree"]), *sys.argv[1:]])


def commit() -> dict[str, Any] | None:
    """Return the commit of the package's checkout, and whether its files have been changed since.

    Return None if the package is not installed from a git checkout.
    """
    folder = Path(draftree.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return {
        "id": _git(folder, "rev-parse", "HEAD"),
        "dirty": bool(_git(folder, "status", "--porcelain", "--", ".")),
    }


def _git(folder: Path, *command: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def fingerprint(model: torch.nn.Module) -> str:
    """Return a hash over the names, the shapes and a sample of the values of all weights.

    At most about 128 values of each tensor are read, so that hashing large models is fast, and none
    of offloaded ones. After further training, the hash differs.
    """
    digest = hashlib.sha256()
    for name, p in sorted(model.state_dict().items()):
        numbers = p if type(p) is torch.Tensor else p.dequantize()  # torchao's tensors
        read = numbers.flatten()[:: max(1, p.numel() // 64)].float()
        sample = [] if p.is_meta else read.tolist()
        digest.update(f"{name}{tuple(p.shape)}{sample}".encode())
    return digest.hexdigest()[:16]
