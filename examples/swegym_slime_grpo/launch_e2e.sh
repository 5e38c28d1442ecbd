#!/usr/bin/env bash
# From an empty machine with 8 GPUs to a running training: agent, model, images, data, a look at the sandbox, run.sh.
# What is there already is kept. `./launch_e2e.sh --dry-run` starts nothing, and shows what would be run.
#   SLIME_DIR, MEGATRON_DIR: checkouts.  TASKS: how many tasks of SWE-Gym, each with an image of a few GB.
set -euo pipefail
# shellcheck source=../slime_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../slime_common.sh"

export HF_CHECKPOINT=${HF_CHECKPOINT:-/root/Qwen3-8B}
export DATA_DIR=${DATA_DIR:-$HERE/data}
IMAGES=${IMAGES:-$DATA_DIR/images}
TASKS=${TASKS:-256}
MODEL=${MODEL:-Qwen/Qwen3-8B}
MINI_VERSION=${MINI_VERSION:-2.4.6}

check_machine() {
    local gpus
    gpus=$(nvidia-smi -L | wc -l)
    ((gpus >= 8)) || die "this example is for 8 GPUs, and here are $gpus"
    local program
    for program in "${DOCKER:-docker}" jq uv curl; do
        command -v "$program" >/dev/null || die "$program is not on PATH"
    done
}

# A Python of its own with mini-swe-agent, below one folder: sandboxes see /agents and nothing else of the host.
install_agent() {
    [[ ! -x /agents/venv/bin/mini ]] || return 0
    run env UV_PYTHON_INSTALL_DIR=/agents/python uv venv --managed-python --python 3.12 /agents/venv
    run uv pip install --python /agents/venv/bin/python "mini-swe-agent==$MINI_VERSION"
}

get_model() {
    [[ -f $HF_CHECKPOINT/config.json ]] || run huggingface-cli download "$MODEL" --local-dir "$HF_CHECKPOINT"
}

make_data() {
    [[ ! -f $DATA_DIR/train.jsonl ]] || return 0
    run mkdir -p "$DATA_DIR"
    run "$PYTHON" - "$DATA_DIR/rows.jsonl" "$TASKS" <<'END'
import sys
from datasets import load_dataset
rows = load_dataset("SWE-Gym/SWE-Gym", split="train").shuffle(seed=1).select(range(int(sys.argv[2])))
rows.to_json(sys.argv[1])
END
    run "$HERE/images.sh" "$DATA_DIR/rows.jsonl" "$IMAGES"
    run "$PYTHON" "$HERE/prepare_data.py" --rows "$DATA_DIR/rows.jsonl" --images "$IMAGES" --out "$DATA_DIR"
}

[[ $DRY_RUN == yes ]] || check_machine
install_agent
get_model
make_data
run "$PYTHON" -m polar doctor
if [[ $DRY_RUN == yes ]]; then
    [[ ! -f $DATA_DIR/train.jsonl ]] || "$HERE/run.sh" --dry-run
else
    "$HERE/run.sh"
fi
