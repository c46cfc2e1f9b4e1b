source .gpu_kit/enter; export PYTHONPATH=$PWD:$PYTHONPATH
python3 -m pytest -m gpu tests/attn_ops/metadata --durations=5 2>&1 | tail -40 > $OUT/meta_tests.txt; tail -30 $OUT/meta_tests.txt
timeout 200 python3 -m benchmarks.metadata --json $OUT/metadata.json > $OUT/bench.txt 2>&1; grep -v '^{' $OUT/bench.txt | tail -45
python3 -m pytest -m gpu tests/gpu 2>&1 | tail -5
python3 -m pytest tests/attn_ops/backends/test_triton.py 2>&1 | tail -5
