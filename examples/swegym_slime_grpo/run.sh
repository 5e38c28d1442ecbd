#!/usr/bin/env bash
# GRPO on SWE-Gym with mini-swe-agent and Qwen3-8B, on one machine with 8 GPUs: four train while four sample.
# `./run.sh --dry-run` starts nothing and shows all; launch_e2e.sh also gets what is needed.
#   SLIME_DIR, MEGATRON_DIR: checkouts.  HF_CHECKPOINT: the model.  RUN_DIR: what the run leaves.
#   Further flags of Slime's go behind those below, and win: `./run.sh --num-rollout 5`
set -euo pipefail
# shellcheck source=../slime_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../slime_common.sh"

HF_CHECKPOINT=${HF_CHECKPOINT:-/root/Qwen3-8B}
RUN_DIR=${RUN_DIR:-$HERE/run}
DATA_DIR=${DATA_DIR:-$HERE/data}
TOPOLOGY=$HERE/topology.yaml
# prompt and answers of a trace together: what the engine takes, and what two GPUs (context parallel) take in one pass
CONTEXT=32768

POLAR_ARGS=(
    --rollout-function-path slime_bridge.rollout.generate_rollout_polar_async
    --custom-rm-path slime_bridge.reward.reward_func
    --custom-reward-post-process-path slime_bridge.reward_post_process.post_process_rewards
    --data-source-path slime_bridge.data_source.CeilEpochRolloutDataSourceWithBuffer
    --custom-config-path "$HERE/polar.yaml"
    --use-dynamic-batch-size
    --max-tokens-per-gpu $((CONTEXT / 2))
)
CHECKPOINT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "${HF_CHECKPOINT}_torch_dist"
    --load "$RUN_DIR/checkpoints"
    --save "$RUN_DIR/checkpoints"
    --save-interval 10
)
ROLLOUT_ARGS=(
    --prompt-data "$DATA_DIR/train.jsonl"
    --input-key prompt
    --label-key label
    --metadata-key metadata
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 8
    --n-samples-per-prompt 8
    --global-batch-size 64
    --rollout-temperature 1.0
    --rollout-top-p 1.0
    --rollout-max-response-len 4096
    --balance-data
)
EVAL_ARGS=(
    --eval-interval 20
    --skip-eval-before-train
    --eval-prompt-data swegym "$DATA_DIR/eval.jsonl"
    --n-samples-per-eval-prompt 1
)
ALGORITHM_ARGS=(
    --advantage-estimator grpo
    --disable-grpo-std-normalization
    --eps-clip 0.2
    --eps-clip-high 0.28
    --entropy-coef 0.0
    --use-tis
)
TRAIN_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 2
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --log-probs-chunk-size 1024
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --use-tensorboard
)
ENGINE_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --num-gpus-per-node 8
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.85
    --sglang-context-length "$CONTEXT"
    --sglang-router-port "$ROUTER_PORT"
)

[[ -f $DATA_DIR/train.jsonl ]] || die "no $DATA_DIR/train.jsonl: see prepare_data.py, or launch_e2e.sh"
# the gateway imports swegym_evaluator from here
export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"
load_slime qwen3-8B.sh
convert_weights "$HF_CHECKPOINT"
start_polar --topology "$TOPOLOGY"
start_slime train_async.py "${MODEL_ARGS[@]}" "${POLAR_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" "${ALGORITHM_ARGS[@]}" "${TRAIN_ARGS[@]}" "${ENGINE_ARGS[@]}" "$@"
