#!/usr/bin/env bash
# GRPO on reasoning-gym with Qwen3-0.6B, on one or two GPUs. `./run.sh --dry-run` starts nothing and shows all.
#   NUM_GPUS=2 (default): one trains while the other samples.  NUM_GPUS=1: they share it, by turns.
#   SLIME_DIR, MEGATRON_DIR: checkouts.  HF_CHECKPOINT: the model.  RUN_DIR: what the run leaves.
#   Further flags of Slime's go behind those below, and win: `./run.sh --num-rollout 5`
set -euo pipefail
# shellcheck source=../slime_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../slime_common.sh"

NUM_GPUS=${NUM_GPUS:-2}
HF_CHECKPOINT=${HF_CHECKPOINT:-/root/Qwen3-0.6B}
RUN_DIR=${RUN_DIR:-$HERE/run}
DATA_DIR=${DATA_DIR:-$HERE/data}

POLAR_ARGS=(
    --rollout-function-path slime_bridge.rollout.generate_rollout_polar_async
    --custom-rm-path slime_bridge.reward.reward_func
    --custom-reward-post-process-path slime_bridge.reward_post_process.post_process_rewards
    --data-source-path slime_bridge.data_source.CeilEpochRolloutDataSourceWithBuffer
    --custom-config-path "$HERE/polar.yaml"
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
)
CHECKPOINT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "${HF_CHECKPOINT}_torch_dist"
    --load "$RUN_DIR/checkpoints"
    --save "$RUN_DIR/checkpoints"
    --save-interval 20
)
ROLLOUT_ARGS=(
    --prompt-data "$DATA_DIR/train.jsonl"
    --input-key prompt
    --label-key label
    --metadata-key metadata
    --rollout-shuffle
    --num-rollout 100
    --rollout-batch-size 16
    --n-samples-per-prompt 8
    --global-batch-size 128
    --rollout-temperature 1.0
    --rollout-top-p 1.0
    --rollout-max-response-len 2048
    --balance-data
)
EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data reasoning_gym "$DATA_DIR/eval.jsonl"
    --n-samples-per-eval-prompt 1
)
TRAIN_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
    --entropy-coef 0.0
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --use-tensorboard
)
ENGINE_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 1
    --num-gpus-per-node "$NUM_GPUS"
    --rollout-num-gpus 1
    --rollout-num-gpus-per-engine 1
    --sglang-router-port "$ROUTER_PORT"
)
case $NUM_GPUS in
    # The engine keeps its memory while the other trains: a model of this size leaves room for both.
    1) LOOP=train.py ENGINE_ARGS+=(--colocate --no-offload-rollout --sglang-mem-fraction-static 0.3) ;;
    2) LOOP=train_async.py ENGINE_ARGS+=(--sglang-mem-fraction-static 0.8) ;;
    *) die "NUM_GPUS is $NUM_GPUS: this example is for 1 or 2" ;;
esac

[[ -f $DATA_DIR/train.jsonl ]] || die "no $DATA_DIR/train.jsonl: $PYTHON $HERE/prepare_data.py --out $DATA_DIR"
load_slime qwen3-0.6B.sh
convert_weights "$HF_CHECKPOINT"
start_polar --init-workers 8 --run-workers 64 --postrun-workers 8
start_slime "$LOOP" "${MODEL_ARGS[@]}" "${POLAR_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${ENGINE_ARGS[@]}" "$@"
