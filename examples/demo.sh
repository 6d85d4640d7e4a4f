#!/bin/sh
# The main job, for real: SmolLM2-135M answers a question about a 6.5K-token document of this project on the CPU.
# Usage: sh examples/demo.sh [path of the rapid command]
set -eu
rapid=${1:-rapid}
here=$(dirname "$0")
question="When did the greatest avalanche in the record come down?"

echo "==> Question: $question"
echo "==> The drafter reads the retrieved passages, the target all of skerrow_fell.md and verifies (method rapid)."
echo "    The first run converts the embedded model once; reading the document takes most of the rest."
"$rapid" ask "$question" "$here/skerrow_fell.md" --max-new-tokens 64
