#!/usr/bin/env bash
# Everything that one GPU can show of Quartet in about eight minutes: the tests of the GPU, whole GRPO and PPO steps on a
# real model and on shapes of 0.5 B and 1.5 B beside TRL's, the rollout engine beside `generate`, updates as MFU.
#
#   python benchmarks/gpu/packages.py --download     # where there is a package index: 5 MB into wheels/, carried along
#   benchmarks/gpu/quarter_hour.sh OUT [STORY]       # on the machine with the GPU: writes OUT/gpu.json, OUT/gpu.md, logs
#
# STORY is the directory of the model stories260K; without one that row is left out. SMOKE=1 runs it all on the CPU with
# tiny models, to see that it runs. PYTHON names the interpreter that has torch and transformers.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
story=() && [ -n "${2:-}" ] && story=(--story "$(cd "$2" && pwd)")
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
PYTHONPATH=$("$python" benchmarks/gpu/packages.py) || exit 1
export PYTHONPATH PYTHONUNBUFFERED=1

# A worker has neighbouring tests, which share compiled kernels, and compiles by itself: all cores are busy already.
export TORCHINDUCTOR_COMPILE_THREADS=1
tests=(-n 12 --dist worksteal tests/gpu -m gpu) models=(--models 0.5B 1.5B --repeats 2) limit=150
if [ -n "${SMOKE:-}" ]; then
    export QUARTET_TEST_DEVICE=cpu
    tests=(tests/gpu -m gpu -k "causal and short") models=(--smoke --device cpu) limit=600
fi
begun=$SECONDS
timeout -s INT "$limit" "$python" -m pytest -v --tb=short -p no:cacheprovider "${tests[@]}" >"$out/tests.log" 2>&1
status=$?
echo "tests of the GPU: $(tail -n 1 "$out/tests.log") (exit status $status, $((SECONDS - begun)) s)" | tee "$out/tests.txt"
# A part that fails leaves the others: each writes what it has.
for part in step rollout training kernels; do
    begun=$SECONDS
    timeout "$((2 * limit))" "$python" benchmarks/gpu/run.py --out "$out" "${models[@]}" "${story[@]}" --processes 1 \
        --add --parts "$part" >"$out/$part.log" 2>&1 || echo "$part failed: $(tail -n 1 "$out/$part.log")"
    echo "$part: $((SECONDS - begun)) s"
done
cat "$out/gpu.md"
