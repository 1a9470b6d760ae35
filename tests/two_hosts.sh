#!/bin/sh
# Trains over two hosts that are network namespaces with an sshd each. As root on Linux, with
# iproute2, nftables and openssh-server; takes about ten minutes:
#
#   sudo tests/two_hosts.sh [COMMAND]      COMMAND: hephaestus, with its arguments so far
#
#   10.77.1.2 one --- hub --- two 10.77.2.2        replay and learner; actor and evaluator
#
# `hephaestus launch` runs in the hub, which routes between the two. First the link of `two` is cut
# for a minute and restored; nobody may fail for it. Then a packet filter on both hosts drops whatever
# comes in but TCP to port 22, and only a tunnel through ssh connects the actor with replay.
set -eu
for tool in ip nft sshd ssh-keygen python3; do
  command -v $tool > /dev/null && continue
  echo "two_hosts: there is no $tool; Debian has it by: apt-get install iproute2 nftables" \
    "openssh-server python3"
  exit 2
done
[ "$(id -u)" = 0 ] || { echo 'two_hosts: must be run by root, because only root may make hosts'; exit 2; }
command=${1:-$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/hephaestus}
folder=$(mktemp -d)
tiny="$(cd "$(dirname "$0")" && python3 -c 'import tiny; print(*tiny.RUN)') learner.checkpoint_period=20
  actor.log_period=1"

clean_up() {
  status=$?
  trap - EXIT
  set +e
  for name in one two; do
    [ -f "$folder/$name.pid" ] && kill "$(cat "$folder/$name.pid")"
    ip netns pids "heph-$name" | xargs -r kill 2> /dev/null
    ip netns del "heph-$name"
  done
  ip netns del heph-hub
  [ $status = 0 ] && rm -rf "$folder" || echo "failed; see $folder"
  exit $status
}
trap clean_up EXIT
trap 'exit 130' INT TERM

say() { echo "two_hosts: $*"; }
fail() { say "$*"; tail -n 40 "$folder/output"; exit 1; }
hub() { ip netns exec heph-hub "$@"; }

# reaches PORT: whether `two` can open a connection to a port of `one`.
reaches() {
  ip netns exec heph-two python3 -c 'import socket, sys
socket.create_connection(("10.77.1.2", int(sys.argv[1])), 3)' "$1" 2> /dev/null
}

# filter HOST: drops and counts whatever comes in but TCP to port 22, and answers from such ports.
filter() {
  ip netns exec "heph-$1" nft -f - << EOF
table inet only_ssh {
  counter ssh {}
  counter replay {}
  counter others {}
  chain input {
    type filter hook input priority 0; policy drop;
    iif lo accept
    tcp dport 22 counter name ssh accept
    tcp sport 22 ct state established accept
    tcp dport 22001 counter name replay drop
    counter name others drop
  }
}
EOF
}

# packets HOST COUNTER
packets() {
  ip netns exec "heph-$1" nft list counter inet only_ssh "$2" | grep -o 'packets [0-9]*' \
    | grep -o '[0-9]*'
}

ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
mkdir -p /run/sshd
ip netns add heph-hub
hub sysctl -q net.ipv4.ip_forward=1
number=0
for name in one two; do
  number=$((number + 1))
  ip netns add "heph-$name"
  ip -n heph-hub link add "to-$name" type veth peer name eth0 netns "heph-$name"
  ip -n heph-hub address add "10.77.$number.1/24" dev "to-$name"
  ip -n heph-hub link set "to-$name" up
  ip -n "heph-$name" address add "10.77.$number.2/24" dev eth0
  ip -n "heph-$name" link set lo up
  ip -n "heph-$name" link set eth0 up
  ip -n "heph-$name" route add default via "10.77.$number.1"
  mkdir "$folder/$name"
  ip netns exec "heph-$name" "$(command -v sshd)" -f /dev/null -p 22 -h "$folder/key" \
    -o "PidFile=$folder/$name.pid" -o "AuthorizedKeysFile=$folder/key.pub" -o StrictModes=no \
    -o PermitRootLogin=yes
done
ip -n heph-hub link set lo up

# hosts FILE TUNNEL: writes a hosts file.
hosts() {
  options="[-i, $folder/key, -oStrictHostKeyChecking=no, -oUserKnownHostsFile=$folder/known]"
  cat > "$1" << EOF
command: $command
hosts:
  one:
    replay: {address: 10.77.1.2, port: 22001}
    learner: true
    ssh: {target: root@10.77.1.2, options: $options}
    directory: $folder/one
  two:
    actors: 1
    evaluator: true
    tunnel: $2
    ssh: {target: root@10.77.2.2, options: $options}
    directory: $folder/two
EOF
}

# launch RUN STEPS: begins a run in the background.
launch() {
  # shellcheck disable=SC2086
  hub $command launch "$folder/hosts.yaml" --preset laptop --run "$1" --steps "$2" \
    --set $tiny > "$folder/output" 2>&1 &
  launch=$!
}

# step RUN: how far the learner is.
step() {
  grep -o '"learner_step": [0-9]*' "$folder/one/$1/metrics/learner.jsonl" 2> /dev/null \
    | tail -n 1 | grep -o '[0-9]*$' || echo 0
}

# wait_for RUN STEP
wait_for() {
  for _ in $(seq 300); do
    [ "$(step "$1")" -ge "$2" ] && return
    kill -0 $launch 2> /dev/null || fail 'the launch has ended'
    sleep 1
  done
  fail "no step $2 within five minutes"
}

# finish RUN: waits for the end, which must be a good one.
finish() {
  wait $launch || fail "launch ended with $?"
  grep -q 'one: exit 0  two: exit 0' "$folder/output" || fail 'a host did not end well'
  ! grep -h restarting "$folder"/*/"$1"/metrics/events.jsonl || fail 'a node was restarted'
  for name in one two; do
    [ "$(ip netns pids "heph-$name" | xargs -r ps -o comm= -p | grep -cv sshd)" = 0 ] \
      || fail "something is left on $name"
  done
  say "$1: $(grep -h 'done: ' "$folder/output")"
}

say "a link that is cut for a minute"
hosts "$folder/hosts.yaml" false
launch cut 6000
wait_for cut 100
reaches 22001 || fail 'replay cannot be reached while nothing is filtered'
ip -n heph-hub link set to-two down
sleep 5 # what is on its way
before=$(step cut)
sleep 55
after=$(step cut)
ip -n heph-hub link set to-two up
say "cut: learner at $before when the link was cut, at $after a minute later"
wait_for cut $((after + 100))
finish cut

say 'a packet filter on both hosts that lets in only port 22, and a tunnel through ssh'
for name in one two; do filter $name; done
hosts "$folder/hosts.yaml" true
launch tunnel 1500
wait_for tunnel 20
reaches 22 || fail 'port 22 is not open'
[ "$(packets one replay)" = 0 ] || fail 'a packet reached the port of replay outside the tunnel'
! reaches 22001 || fail 'the port of replay is open'
probes=$(packets one replay)
[ "$probes" -gt 0 ] || fail 'the filter has not seen the connection to the port of replay'
finish tunnel
[ "$(packets one replay)" = "$probes" ] || fail 'something went for the port of replay'
for name in one two; do
  [ "$(packets $name ssh)" -gt 1000 ] || fail "hardly anything came to $name through ssh"
  say "$name let in $(packets $name ssh) packets to port 22, dropped $(packets $name replay) to the" \
    "port of replay (of a connection that was tried) and $(packets $name others) others"
done
