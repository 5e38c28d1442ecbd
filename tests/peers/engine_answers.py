"""Answers of the scripted engine, in the words of each API."""

from __future__ import annotations

from typing import Any, Protocol

from tokenizers import Tokenizer


class Machine(Protocol):
    """What an answer wants of its engine. `mode`: of which distribution its logprobs are."""

    incremental: bool
    mode: str
    version: str
    tokenizer: Tokenizer | None
    end: int

    def ids(self, step: dict[str, Any]) -> list[int]: ...

    def render(self, body: dict[str, Any]) -> list[int]: ...


class Answer:
    """One generation, in the words of one API: whole, or as its start, an event a token, and its end."""

    def __init__(self, machine: Machine, step: dict[str, Any], body: dict[str, Any]) -> None:
        self.machine, self.step, self.body = machine, step, body
        self.all_ids = machine.ids(step)
        self.sampling = body.get("sampling_params") or body
        self.ids = self.all_ids[: self.sampling.get("max_new_tokens") or self.sampling.get("max_tokens")]
        default = "length" if len(self.ids) < len(self.all_ids) else "stop"
        self.finish = default if default == "length" else step.get("finish", default)
        self.logprobs = step.get("logprobs", [self._logprob()] * len(self.ids))

    def spans(self) -> list[list[Any]]:
        return self.step.get("versions", [[0, len(self.all_ids), self.step.get("version", self.machine.version)]])

    def _logprob(self) -> float:
        if self.machine.mode == "processed" and self.sampling.get("top_k") == 1:
            return 0.0
        # A probe asks at 0.1 and 2 as well, to see whether logprobs follow.
        by_temperature = {} if self.machine.mode == "raw" else {0.1: -0.1, 2.0: -0.9}
        return by_temperature.get(self.sampling.get("temperature"), -0.5)

    def matched(self, default: Any = None) -> Any:
        return self.step.get("matched", self.ids[-1] if self.finish == "stop" and self.ids else default)

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def start(self) -> list[dict[str, Any]]:
        return []

    def event(self, start: int, end: int, *, last: bool) -> dict[str, Any]:
        raise NotImplementedError

    def end(self) -> list[dict[str, Any]]:
        return []

    def done(self, document: dict[str, Any]) -> dict[str, Any]:
        for part in (document, *document.get("choices", []), document.get("meta_info", {})):
            for name in self.step.get("without", []):
                part.pop(name, None)
        return document


class Generate(Answer):
    """SGLang's /generate."""

    def whole(self) -> dict[str, Any]:
        return self.event(0, len(self.ids), last=True, cumulative=True)

    def event(self, start: int, end: int, *, last: bool, cumulative: bool | None = None) -> dict[str, Any]:
        repeats = not self.machine.incremental if cumulative is None else cumulative
        first = 0 if repeats else start
        meta: dict[str, Any] = {
            "id": self.body.get("rid"),
            "finish_reason": {"type": self.finish, "matched": self.matched()} if last else None,
            "prompt_tokens": len(self.body["input_ids"]),
            "completion_tokens": end,
            "weight_version": next(version for _, upto, version in self.spans() if end <= upto),
        }
        if last:
            meta |= self.step.get("says", {})
        if self.step.get("fault") != "no_ids":
            pairs = zip(self.logprobs[first:end], self.ids[first:end], strict=False)
            meta["output_token_logprobs"] = [[logprob, number, None] for logprob, number in pairs]
            if self.body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [[entry] for entry in meta["output_token_logprobs"]]
        document = {"text": "", "output_ids": self.ids[first:end], "meta_info": meta}
        if self.step.get("fault") == "no_ids":
            del document["output_ids"]
        return self.done(document)


class Tokens(Answer):
    """vLLM's token endpoint."""

    def whole(self) -> dict[str, Any]:
        return self.event(0, len(self.ids), last=True)

    def event(self, start: int, end: int, *, last: bool) -> dict[str, Any]:
        told = [{"start": at, "end": min(upto, end), "version": name} for at, upto, name in self.spans() if at < end]
        finish = {"finish_reason": self.finish, "stop_reason": self.step.get("matched")}
        choice = {"index": 0, "token_ids": self.ids[start:end], **self.entries(start, end)}
        choice |= finish if last else {"finish_reason": None}
        choice["weight_versions"] = told if last else None
        if self.step.get("fault") == "no_ids":
            del choice["token_ids"]
        return self.done({"request_id": self.body.get("request_id"), "choices": [choice]})

    def entries(self, start: int, end: int) -> dict[str, Any]:
        pairs = zip(self.ids[start:end], self.logprobs[start:end], strict=False)
        return {"logprobs": {"content": [{"token_id": number, "logprob": logprob} for number, logprob in pairs]}}

    def end(self) -> list[dict[str, Any]]:
        return [{"choices": [], "usage": {"completion_tokens": len(self.ids)}}]


class Completions(Tokens):
    """Completions of a list of ids."""

    def event(self, start: int, end: int, *, last: bool) -> dict[str, Any]:
        document = super().event(start, end, last=last)
        document["choices"][0].pop("weight_versions")
        return document

    def entries(self, start: int, end: int) -> dict[str, Any]:
        return {"text": "", "logprobs": {"token_logprobs": self.logprobs[start:end]}}


class Chat(Answer):
    """Chat completions, with the ids that were asked for."""

    def __init__(self, machine: Machine, step: dict[str, Any], body: dict[str, Any]) -> None:
        super().__init__(machine, step, body)
        prompt = machine.render(body)
        for old, new in [step["drift"]] if "drift" in step else []:
            at = next(i for i in range(len(prompt)) if prompt[i : i + len(old)] == old)
            prompt[at : at + len(old)] = new
        self.with_ids = body.get("return_token_ids") and step.get("fault") != "no_ids"
        self.tells = step.get("tells", "token_ids")
        self.prompt = {"prompt_token_ids": prompt} if self.with_ids else {}
        if self.with_ids and self.tells == "sglext":
            self.prompt = {"sglext": {"input_ids": [prompt], "output_ids": [self.ids]}}
        self.prompt_tokens = len(prompt)

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self.message(), **self.tokens(0, len(self.ids)), **self.finished()}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.ids)}
        return self.done({"object": "chat.completion", "choices": [choice], "usage": usage, **self.prompt})

    def start(self) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self.done({"choices": [choice], **self.prompt})]

    def event(self, start: int, end: int, *, last: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": self.text(start, end)}
        if "deltas" in self.step:
            delta = next(iter(self.step["deltas"][start:end]), {})
        if "message" in self.step:
            delta = self.step["message"] if last else {}
            delta = delta | ({"tool_calls": calls} if (calls := _indexed(delta)) else {})
        finish = self.finished() if last else {"finish_reason": None}
        return self.done({"choices": [{"index": 0, "delta": delta, **self.tokens(start, end), **finish}]})

    def end(self) -> list[dict[str, Any]]:
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.ids)}
        return [{"choices": [], "usage": usage}]

    def message(self) -> dict[str, Any]:
        return self.step.get("message") or {"role": "assistant", "content": self.text(0, len(self.ids))}

    def text(self, start: int, end: int) -> str:
        shown = [number for number in self.ids[start:end] if number != self.machine.end]
        assert self.machine.tokenizer is not None
        return self.machine.tokenizer.decode(shown, skip_special_tokens=False)

    def tokens(self, start: int, end: int) -> dict[str, Any]:
        content = [
            {"token": "x", "logprob": logprob, "top_logprobs": [{"token": "other", "logprob": -0.1}]}
            for logprob in self.logprobs[start:end]
        ]
        ids: dict[str, Any] = {self.tells: self.ids[start:end]} if self.with_ids and self.tells != "sglext" else {}
        if "meta_info" in ids:
            pairs = zip(self.logprobs[start:end], self.ids[start:end], strict=True)
            ids = {"meta_info": {"output_token_logprobs": [[logprob, number, None] for logprob, number in pairs]}}
        return {"logprobs": {"content": content}, **ids}

    def finished(self) -> dict[str, Any]:
        return {"finish_reason": self.finish, "stop_reason": self.step.get("matched")}


def _indexed(delta: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"index": at, **call} for at, call in enumerate(delta.get("tool_calls") or [])]
