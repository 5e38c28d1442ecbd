#!/usr/bin/env bash
# Patches nothing: neither Slime's router nor SGLang needs a patch for exact token ids. Checks that this is so.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: patch_slime_router_tokens.sh [ROUTER_URL]

No patch is needed, and none is made. Polar sends token ids to SGLang's /generate, which routers hand on untouched,
and takes ids and logprobs from its answer. (Routers drop unknown fields of chat completions; Polar asks for none there.)

With ROUTER_URL, e.g. http://127.0.0.1:30000 (also in SLIME_ROUTER_URL), this asks for a few tokens, whole and streamed,
and checks that ids and logprobs come through. Exit code 1: they do not, and the reason is told.
TEXT
}

die() {
    echo "error: $*" >&2
    exit 1
}

# The body of the answer to one question; $1: whether as a stream.
ask() {
    local body status
    body='{"input_ids": [1, 2, 3], "return_logprob": true, "stream": '$1', "sampling_params": {"temperature": 1.0, "max_new_tokens": 4}}'
    status=$(curl -sS --noproxy '*' --max-time 120 -o "$answer" -w '%{http_code}' \
        -H 'Content-Type: application/json' -d "$body" "$url/generate") || die "$url does not answer"
    [[ $status == 200 ]] || die "$url/generate answered $status: $(head -c 300 "$answer")"
}

# $1: how the answer came. The last event of a stream has the whole answer, unless the engine streams only what is new.
check() {
    python3 - "$1" "$answer" <<'PYTHON' || die "exact ids do not come through $url/generate (see above)"
import json, math, sys

how, path = sys.argv[1:]
text = open(path).read()
events = [line[5:] for line in text.splitlines() if line.startswith("data:") and "[DONE]" not in line]
answers = [json.loads(event) for event in events] if how == "streamed" else [json.loads(text)]
if not answers:
    sys.exit("no event came")
meta = [answer.get("meta_info") or {} for answer in answers]
count = meta[-1].get("completion_tokens")
pairs = meta[-1].get("output_token_logprobs") or []
if len(pairs) != count:
    pairs = [pair for each in meta for pair in each.get("output_token_logprobs") or []]
if not pairs:
    sys.exit(f"{how}: the answer has no output_token_logprobs")
if len(pairs) != count:
    sys.exit(f"{how}: {count} tokens, but {len(pairs)} pairs of logprob and id")
if not all(isinstance(pair[1], int) and isinstance(pair[0], (float, int)) and math.isfinite(pair[0]) for pair in pairs):
    sys.exit(f"{how}: a token has no id or no logprob: {pairs}")
if meta[-1].get("prompt_tokens") != 3:
    sys.exit(f"{how}: 3 prompt ids were sent, the engine saw {meta[-1].get('prompt_tokens')}")
version = meta[-1].get("weight_version")
print(f"{how}: ids {[pair[1] for pair in pairs]}, a logprob each, policy version {version}")
PYTHON
}

case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
esac
[[ $# -le 1 ]] || { usage >&2; exit 2; }
url=${1:-${SLIME_ROUTER_URL:-}}
url=${url%/}
if [[ -z $url ]]; then
    usage
    exit 0
fi
[[ $url == http://* || $url == https://* ]] || { usage >&2; exit 2; }

answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
ask false
check whole
ask true
check streamed
echo "Exact token ids and logprobs come through $url/generate: no patch is needed, and nothing was changed."
