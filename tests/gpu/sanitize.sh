#!/usr/bin/env bash
# Our Triton kernels under compute-sanitizer, on a GPU machine, from the repository's root:
#     bash tests/gpu/sanitize.sh [tool ...]        default: memcheck initcheck racecheck
# Logs and the summary lines go to $OUT. Exit 1 if a tool reports an error.
set -u
out=${OUT:-out/sanitize}; mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # memcheck then sees every tensor as an allocation
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton_sanitize}
groups="decode prefill quantize output merge metadata mla products experts states sampling"
tools=${*:-memcheck initcheck racecheck}

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
if [ -z "$sanitizer" ]; then
  echo "compute-sanitizer is not on this machine: nothing was checked" | tee "$out/summary.txt"
  exit 0
fi
"$sanitizer" --version | tail -2 | tee "$out/summary.txt"

echo "== compiling the kernels, unsanitized"
if ! timeout 300 "$python" -m tests.gpu.sanitize_cases $groups >"$out/plain.log" 2>&1; then
  tail -20 "$out/plain.log"; echo "the cases fail without a sanitizer" | tee -a "$out/summary.txt"; exit 1
fi

# racecheck is slow: PyTorch's own kernels are left out where the version can do that. initcheck may
# not leave any out: it would not see what they write.
help=$("$sanitizer" --help 2>&1)
exclude=$(grep -o -m1 -e '--kernel-name-exclude' -e '--kernel-regex-exclude' <<<"$help" | head -1)

one() {
  tool=$1; group=$2
  options="--tool $tool --error-exitcode 1 --print-limit 20"
  [ "$tool" = racecheck ] && [ -n "$exclude" ] && options="$options $exclude kns=at6native"
  log=$out/$tool-$group.log; begin=$SECONDS
  timeout -k 5 ${LIMIT:-240} "$sanitizer" $options "$python" -m tests.gpu.sanitize_cases "$group" >"$log" 2>&1
  status=$?
  summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1)
  [ $status -ge 124 ] && summary="no result: stopped; $summary"
  grep -q "^$group: ran" "$log" || summary="the cases did not finish; $(grep -m1 'not supported' "$log") $summary"
  printf '%s %s: exit %s, %s s: %s\n' "$tool" "$group" $status $((SECONDS - begin)) "$summary" >>"$out/summary.txt"
  [ $status -eq 0 ] || { grep -E '=========' "$log" | head -30 >>"$out/summary.txt"; touch "$out/failed"; }
}
for tool in $tools; do for group in $groups; do one $tool $group & done; done
wait
cat "$out/summary.txt" | head -150
failed=0; [ -e "$out/failed" ] && failed=1
# At most 8 files come back from a device machine.
(cd "$out" && tar czf logs.tgz ./*.log && rm -f ./*.log)
exit $failed
