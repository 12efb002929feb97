"""From what a person writes after ``--model`` to a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

from actors.runtime.config import DEFAULT_MODEL, ConfigError

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"


def resolve_model(name_or_dir: str) -> Path:
    """``demo`` is the checkpoint this package ships; anything else is a Hugging Face directory on this machine.

    Raises ``ConfigError`` when there is no such directory or it lacks what a checkpoint needs.
    """
    folder = DEMO_MODEL_DIR if name_or_dir == DEFAULT_MODEL else Path(name_or_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"--model {name_or_dir!r}: no such directory. Give a Hugging Face checkpoint directory on this machine, "
            f"or {DEFAULT_MODEL!r} for the small model that comes with kvferry."
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"--model {name_or_dir!r}: {folder} is not a checkpoint directory, it lacks {missing}.")
    return folder.resolve()
