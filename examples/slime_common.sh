# shellcheck shell=bash
# What run.sh of both Slime examples share: Polar beside Slime on one machine, both ended together.

HERE=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
PYTHON=${PYTHON:-python3}
DRY_RUN=no
if [[ ${1:-} == --dry-run ]]; then
    DRY_RUN=yes
    shift
fi

# Slime's router and engines listen on this address, and the gateway asks the router there.
export SLIME_HOST_IP=${SLIME_HOST_IP:-127.0.0.1}
ROUTER_PORT=${ROUTER_PORT:-30000}
# polar_rollout_url in polar.yaml has it too
POLAR_PORT=8080

die() {
    echo "error: $*" >&2
    exit 1
}

# A command, as it is run; with --dry-run it is only shown.
run() {
    if [[ $DRY_RUN == yes ]]; then
        printf '+'
        printf ' %q' "$@"
        printf '\n'
    else
        "$@"
    fi
}

# The checkouts, and MODEL_ARGS: the model's shape in Megatron's flags, from the file $1 of Slime's scripts/models.
load_slime() {
    MODEL_ARGS=()
    if [[ -z ${SLIME_DIR:-} && $DRY_RUN == yes ]]; then
        echo "# SLIME_DIR is not set: the flags of the model's shape (scripts/models/$1) are missing below"
        SLIME_DIR=SLIME_DIR MEGATRON_DIR=MEGATRON_DIR
        return
    fi
    [[ -f ${SLIME_DIR:-}/train.py ]] || die "SLIME_DIR must name a checkout of Slime v0.3.0"
    # shellcheck source=/dev/null
    source "$SLIME_DIR/scripts/models/$1"
    [[ $DRY_RUN == yes || -d ${MEGATRON_DIR:-}/megatron ]] || die "MEGATRON_DIR must name a checkout of Megatron-LM"
    MEGATRON_DIR=${MEGATRON_DIR:-MEGATRON_DIR}
}

# Megatron's form of the weights in $1, beside them; made once.
convert_weights() {
    [[ $DRY_RUN == yes || -f $1/config.json ]] || die "no model in $1: huggingface-cli download ... --local-dir $1"
    [[ ! -d $1_torch_dist ]] || return 0
    run env PYTHONPATH="$MEGATRON_DIR:$SLIME_DIR" "$PYTHON" "$SLIME_DIR/tools/convert_hf_to_torch_dist.py" \
        "${MODEL_ARGS[@]}" --hf-checkpoint "$1" --save "$1_torch_dist"
}

# The rollout server with a gateway, in front of Slime's router, whether that is up already or not; "$@" are
# further options of `polar serve`. It ends with this script.
start_polar() {
    local command=("$PYTHON" -m polar serve --engine sglang --engine-url "http://$SLIME_HOST_IP:$ROUTER_PORT"
        --tokenizer "$HF_CHECKPOINT" --port "$POLAR_PORT" --data "$RUN_DIR/polar" "$@")
    if [[ $DRY_RUN == yes ]]; then
        run "${command[@]}"
        return
    fi
    mkdir -p "$RUN_DIR"
    "${command[@]}" >"$RUN_DIR/polar.log" 2>&1 &
    POLAR_PID=$!
    trap stop_polar EXIT
    local tries
    for ((tries = 0; tries < 120; tries++)); do
        kill -0 "$POLAR_PID" 2>/dev/null || die "polar serve has ended: $(tail -n 5 "$RUN_DIR/polar.log")"
        if curl -sf "http://127.0.0.1:$POLAR_PORT/health" >/dev/null; then
            return
        fi
        sleep 0.5
    done
    die "polar serve does not answer: see $RUN_DIR/polar.log"
}

stop_polar() {
    kill "$POLAR_PID" 2>/dev/null || true
    wait "$POLAR_PID" 2>/dev/null || true
}

# Slime's loop $1 (train.py or train_async.py) with the flags that follow. Ray is started with it and ends with it;
# its processes are of the same Python, and so find Polar's bridge. Of TOPOLOGY a dry run shows what it says.
start_slime() {
    local loop=$1
    shift
    if [[ $DRY_RUN == yes ]]; then
        "$PYTHON" "$HERE/../dry_run.py" ${TOPOLOGY:+--topology "$TOPOLOGY"} "$@"
    fi
    run env PYTHONPATH="$MEGATRON_DIR:$SLIME_DIR${PYTHONPATH:+:$PYTHONPATH}" TENSORBOARD_DIR="$RUN_DIR/tensorboard" \
        CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1 "$PYTHON" "$SLIME_DIR/$loop" "$@"
}
