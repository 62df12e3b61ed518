# FOLDER PYTHON WORKER: two ranks in each of two network namespaces that only a veth pair joins. Run by `unshare --user --map-root-user --net`.
set -eu
folder=$1 python=$2 worker=$3
unshare --net sleep 300 &
other=$!
trap 'kill $other' EXIT
sleep 0.3
ip link set lo up
ip link add ckpt0 type veth peer name ckpt1 netns $other
ip addr add 10.77.0.1/24 dev ckpt0
ip link set ckpt0 up
in_other="nsenter --target $other --net"
$in_other ip link set lo up
$in_other ip addr add 10.77.0.2/24 dev ckpt1
$in_other ip link set ckpt1 up
run="$python -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --master-addr=10.77.0.1 --master-port=29577"
GLOO_SOCKET_IFNAME=ckpt1 $in_other $run --node-rank=1 "$worker" "$folder" apart &
second=$!
GLOO_SOCKET_IFNAME=ckpt0 $run --node-rank=0 "$worker" "$folder" apart
wait $second
