"""``kvferry generate``: an offline run. Starts a cluster, sends every prompt, prints one JSON object per request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.runtime.config import ConfigError, Options
from scripts.client import RequestError, complete_all
from scripts.cluster import Cluster

TIMINGS = ("ttft_ms", "tpot_ms", "e2e_ms", "handoff_ms", "restore_ms", "bytes_moved")


def _is_request(fields: dict[str, Any]) -> bool:
    known = set(fields) <= {"prompt", "prompt_token_ids", "max_tokens"}
    return known and ("prompt" in fields) != ("prompt_token_ids" in fields)


def read_prompts_file(path: Path) -> list[dict[str, Any]]:
    """Lines of ``{"prompt": …}`` or ``{"prompt_token_ids": […]}``, optionally with ``max_tokens``."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--prompts-file {path}, line {number}: not JSON: {error}") from error
        if not isinstance(request, dict) or not _is_request(request):
            raise ConfigError(
                f"--prompts-file {path}, line {number}: expected an object with 'prompt' or 'prompt_token_ids' "
                "and optionally 'max_tokens'"
            )
        requests.append(request)
    return requests


def parse_token_ids(text: str) -> list[int]:
    """A JSON list of token ids, as given to ``--prompt-token-ids``."""
    try:
        token_ids = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--prompt-token-ids {text!r}: not JSON: {error}") from error
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise ConfigError(f"--prompt-token-ids {text!r}: expected a list of integers, for example '[1, 2, 3]'")
    return token_ids


def payload_of(request: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The API call for one request: its own fields over ``defaults``."""
    fields = {key: value for key, value in request.items() if key not in ("prompt", "prompt_token_ids")}
    prompt = request["prompt"] if "prompt" in request else request["prompt_token_ids"]
    return defaults | fields | {"prompt": prompt, "return_token_ids": True}


def result_of(index: int, answer: dict[str, Any] | RequestError) -> dict[str, Any]:
    """The JSON object printed for one request."""
    if isinstance(answer, RequestError):
        return {"index": index, "error": {"code": answer.status, "message": str(answer)}}
    choice = answer["choices"][0]
    measured = answer.get("kvferry", {})
    return {
        "index": index,
        "prompt_token_ids": choice["prompt_token_ids"],
        "token_ids": choice["token_ids"],
        "text": choice["text"],
        "finish_reason": choice["finish_reason"],
        "usage": answer["usage"],
        "timings": {name: measured.get(name, 0) for name in TIMINGS},
    }


def generate(options: Options, requests: list[dict[str, Any]], defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all requests on a fresh cluster; results in input order, failed ones with an ``error`` object."""
    with Cluster(options) as cluster:
        answers = complete_all(cluster.url, [payload_of(request, defaults) for request in requests])
    return [result_of(index, answer) for index, answer in enumerate(answers)]
