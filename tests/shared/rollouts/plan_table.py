# SPDX-License-Identifier: Apache-2.0
"""The table of the planner's rules: the actions that it must plan for a target and the existing groups.

Each case has a line with the property that it checks, and a line `TARGET: GROUPS -> ACTIONS` in the notation
of `plan_cases.py`.
"""

from __future__ import annotations

from plan_cases import read_cases

CASES = read_cases(
    """
# No rollout.
a new service gets all its groups
    2 A: none -> +A0, +A1
nothing is done while all groups serve
    2 A: A0 serving, A1 serving -> none
nothing is done while groups start
    2 A: A0 starting, A1 ready -> none
a scale-up creates the missing groups
    3 A: A0 serving -> +A1, +A2
a scale-down retires the highest index
    1 A: A0 serving, A1 serving -> -A1
a scale-down retires a group that does not serve first
    1 A: A0 starting, A1 serving -> -A0
a scale-down retires a crashing group first
    2 A: A0 ready, A1 crashing, A2 serving -> -A1
a suspended service loses all its groups
    0 A: A0 serving, B1 serving -> -A0, -B1
a scale-up leaves the groups that serve alone
    3 A: A0 serving, A1 serving -> +A2
a scale-down retires a partly routed group before a serving one
    1 A: A0 partly_routed, A1 serving -> -A0
a scale-down retires a crashing group before a starting one
    1 A: A0 crashing, A1 starting -> -A0
a scale-down retires an unready group before a ready one
    1 A: A0 unready, A1 ready -> -A0
a scale-down retires a group that never served before one that has
    1 A: A0 starting, A1 unready -> -A0
of two groups with one index the later attempt is retired
    1 A: A0 serving, A0-1 serving -> -A0-1

# Groups terminate and end.
a terminating group is replaced at once
    1 A: A0 terminating -> +A0-1
a terminating replacement is replaced at once
    1 A: A0 terminating, A0-1 terminating -> +A0-2
a terminating group is replaced under its own index
    2 A: A0 terminating, A1 serving -> +A0-1
an ended group is replaced
    1 A: A0 ended -> -A0, +A0-1
a group that ended at once backs off
    2 A: A0-3 backing_off, A1 serving -> none
only as many groups back off as are missing
    1 A: A0 backing_off, A0-1 backing_off -> -A0
a group that backs off keeps one place only
    2 A: A0 backing_off -> +A1
a group does not back off in a place that is not wanted
    0 A: A0 backing_off -> -A0
a group does not back off in a place that is taken
    1 A: A0 serving, A1 backing_off -> -A1
no group backs off while there are too many
    0 A: A0 serving, A1 backing_off, A2 backing_off -> -A1, -A2, -A0
a terminating group does not back off
    1 A: A0 backing_off_terminating -> +A0-1

# Groups of several pods.
nothing is done while a group of several pods is complete
    1 A: A0 complete -> none
a group with a terminating pod is replaced as a whole
    1 A: A0 partly_terminating -> -A0, +A0-1
an incomplete group is replaced as a whole
    1 A: A0 incomplete -> -A0, +A0-1
a partly created group is completed
    1 A: A0 partly_created -> +A0
an incomplete group does not back off
    1 A: A0 backing_off_incomplete -> -A0, +A0-1

# The first rollout: no revision is stable yet.
a rollout starts with one surge group
    2 B: A0 serving, A1 serving -> +B2
an outdated group stays while its replacement starts
    1 B: A0 serving, B1 starting -> none
an outdated group stays while no gateway routes to its replacement
    1 B: A0 serving, B1 ready -> none
an outdated group is retired once its replacement serves
    1 B: A0 serving, B1 serving -> -A0
one outdated group is retired for each updated group that serves
    2 B: A0 serving, A1 serving, B2 serving -> -A1
the next updated group is created while an outdated one terminates
    2 B: A0 serving, A1 terminating, B2 serving -> +B1
an outdated group stays while its replacement crashes
    1 B: A0 serving, B1 crashing -> none
an unready outdated group stays while its replacement starts
    1 B: A0 unready, B1 starting -> none
a partly routed outdated group stays while its replacement starts
    1 B: A0 partly_routed, B1 starting -> none
nothing is retired while no gateway answers
    1 B: A0 partly_routed, B1 partly_routed -> none
a revert deletes a crashing group of the reverted revision
    1 A: A0 serving, B1 crashing -> -B1
a third revision supersedes a second one that never served
    1 C: A0 serving, B1 crashing -> -B1, +C1
an outdated group that never served is superseded
    1 B: A0 starting -> -A0, +B0
an outdated partly created group is superseded
    1 B: A0 partly_created -> -A0, +B0
a group of an outdated revision does not back off
    1 B: A0 backing_off -> -A0, +B0
an updated group that ended at once backs off during a rollout
    1 B: A0 serving, B1-2 backing_off -> none
a scale-up during a rollout creates updated groups
    3 B: A0 serving, B1 starting -> +B2, +B3
a scale-down during a rollout retires outdated groups
    1 B: A0 serving, A1 serving, A2 serving, B3 starting -> -A2, -A1
an updated group that is no longer ready replaces nothing
    1 B: A0 serving, B1 stale -> none
mismatched groups are retired at once if no revision is stable
    1 B: A0 mismatched -> +B1, -A0
an outdated group that every gateway just acknowledged is kept
    1 B: A0 acknowledged -> +B1
an updated group awaiting verification replaces nothing even if gateways route to it
    1 B: A0 serving, B1 misrouted -> none
a group awaiting verification stays after golden prompts were removed
    1 A: A0 awaiting_verification -> none

# One revision replaces another.
a rollout from a stable revision starts with one surge group
    2 B stable: A0 serving, A1 serving -> +B2
a rollout uses max_surge and max_unavailable together
    4 B stable max_surge=2 max_unavailable=1: A0 serving, A1 serving, A2 serving, A3 serving -> +B4, +B5, -A3
a third revision replaces the second before the stable one
    2 C stable: A0 serving, B1 serving, C2 serving -> -B1
a revert retires the groups of the reverted revision
    2 A stable: A0 serving, A1 serving, B2 serving -> -B2
a revert keeps as many serving groups as must be available
    2 A stable: A0 serving, B1 serving, B2 serving -> -B2
groups of another outdated revision are retired before stable ones, each once
    2 C stable: A0 serving, B1 serving, C2 serving, C3 serving -> -B1, -A0
a retired surplus group does not count as one that may serve
    1 B stable: A0 unrouted, B1 awaiting_verification, B2 unready -> -B2
a starting surplus group does not count as serving
    1 B stable: A0 serving, B1 serving, B2 starting -> -B2, -A0
starting stable groups are superseded once the updated revision serves
    1 B stable: A0 serving, A1 starting, A2 starting, B3 serving -> -A1, -A2, -A0
a revision that has served stays proven while no gateway routes to it
    1 B stable: B3 unrouted -> none
a revision is proven once every gateway routes to a group of it
    1 B stable: B3 acknowledged -> none

# Groups of the stable revision are restored.
a terminating stable group is restored before the updated revision serves
    2 B stable: A0 serving, A1 terminating, B2 crashing -> +A1-1
a restored group stays until the updated revision serves
    2 B stable: A0 serving, A1-1 starting, B2 crashing -> none
a restored group that never served is superseded once the updated revision serves
    2 B stable: A0 serving, A1-1 starting, B2 serving -> -A1-1, +B1
no group is restored of a stable revision that cannot be restored
    2 B stable can_restore=False: A0 serving, B2 starting -> +B1
a terminating stable group is replaced by an updated one once the revision serves
    2 B stable: A0 serving, A1 terminating, B2 serving -> +B1
a scale-up creates stable groups before the updated revision serves
    3 B stable: A0 serving, B1 starting -> +A2, +A3
a scale-down retires stable groups before the updated revision serves
    1 B stable: A0 serving, A1 serving, B2 starting -> -A1
stable groups are restored before a partly created group is completed
    2 B stable: A0 complete, A1 partly_terminating, B2 partly_created -> -A1, +A1-1, +B2
a stable group is restored before an updated one is created
    1 B stable: none -> +A0, +B1
a stable group is restored before the only updated group is completed
    1 B stable: A0 partly_terminating, B1 partly_created -> -A0, +A0-1, +B1
restored groups respect the surge
    2 B stable: B2 starting, B3 starting -> +A0
a starting group of a revision neither stable nor updated is superseded
    2 B stable: A0 serving, B2 starting, C1 starting -> -C1, +A1
of two restored groups the better one is kept
    1 B stable: A0 starting, A1 ready, B2 starting -> -A0
every stable group to be restored is kept while it starts
    2 B stable: A0 starting, A1 starting, B2 starting -> none

# Outdated groups are broken.
an unready outdated group is retired once an updated group serves
    2 B stable: A0 unready, A1 unready, B2 serving -> -A1
an unready outdated group stays while too few groups may serve
    2 B stable: A0 unready, A1 terminating, B2 serving -> +B1
an outdated group with an open gate is retired like any unready one if its engine is not ready
    2 B stable: A0 unready, A1 stale, B2 serving -> -A1
unready outdated groups are retired until only min_available groups may serve
    2 B stable: A1 unready, A2 unready, A3 unready, B0 serving -> -A3, -A2
unready outdated groups stay while the updated group starts
    2 B stable: A0 unready, A1 unready, B2 starting -> none
an unrouted outdated group is retired once an updated group serves
    2 B stable: A0 unrouted, A1 unrouted, B2 serving -> -A1
unrouted outdated groups stay while the updated group starts
    2 B stable: A0 unrouted, A1 unrouted, B2 starting -> none

# There is no surge.
without surge an outdated group is retired first
    2 B stable max_surge=0 max_unavailable=1: A0 serving, A1 serving -> -A1
without surge an updated group takes the place of a terminating one
    2 B stable max_surge=0 max_unavailable=1: A0 serving, A1 terminating -> +B1
without surge no second outdated group is retired while the updated one starts
    2 B stable max_surge=0 max_unavailable=1: A0 serving, B1 starting -> none
without surge an unready outdated group is retired while the updated one starts
    2 B stable max_surge=0 max_unavailable=1: A0 unready, A1 serving, B2 starting -> -A0
without surge one unready outdated group is retired at once
    2 B stable max_surge=0 max_unavailable=1: A0 unready, A1 unready -> -A1
without surge one unrouted outdated group is retired at once
    2 B stable max_surge=0 max_unavailable=1: A0 unrouted, A1 unrouted -> -A1
without surge partly routed groups stay, because perhaps no gateway answers
    2 B stable max_surge=0 max_unavailable=1: A0 partly_routed, A1 partly_routed -> none
without surge one mismatched group is retired at once
    2 B stable max_surge=0 max_unavailable=1: A0 mismatched, A1 mismatched -> -A1

# Gateways speak another protocol than outdated engines.
mismatched groups stay until the updated revision serves, because gateways may be rolled back
    2 B stable: A0 mismatched, A1 mismatched, B2 starting -> none
all mismatched groups are retired once an updated group serves
    3 B stable: A0 mismatched, A1 mismatched, A2 mismatched, B3 serving -> -A2, -A1, -A0
a mismatched group is retired before a partly routed one
    2 B stable: A0 mismatched, A1 partly_routed, B2 serving -> -A0
a mismatched group is retired before a partly routed one even if either may go
    2 B stable max_unavailable=1 partition=1: A0 mismatched, A1 partly_routed, B2 serving -> -A0
mismatched groups stay while gateways still route to them
    2 B stable: A0 mismatched_serving, A1 mismatched_serving, B2 partly_routed -> none
a mismatched group does not count as one that may serve again
    2 B stable: A0 unready, A1 mismatched, B2 serving -> -A1
a pause keeps mismatched groups
    2 B stable paused: A0 mismatched, A1 mismatched -> none
a partition keeps mismatched groups
    2 B stable partition=1: A0 mismatched, A1 mismatched, B2 serving -> -A1
mismatched groups of the target revision stay
    2 A stable: A0 mismatched, A1 mismatched -> none
a mismatched surplus group is retired at once
    2 B stable partition=2: A0 serving, A1 starting, B2 mismatched -> -B2

# A partition keeps outdated groups.
a partition keeps its outdated groups
    3 B stable partition=2: A0 serving, A1 serving, B2 serving -> none
a missing group of the partition is restored
    3 B stable partition=2: A0 serving, B2 serving -> +A1
a larger partition restores stable groups first
    3 B stable partition=2: A0 serving, B1 serving, B2 serving -> +A3
a larger partition retires updated groups once stable ones serve
    3 B stable partition=2: A0 serving, A3 serving, B1 serving, B2 serving -> -B2
a partition larger than the service covers all groups
    2 B stable partition=9: A0 serving, A1 serving, B2 serving -> -B2
a partition does not affect a revert
    2 A stable partition=2: A0 serving, A1 serving, B2 serving -> -B2
a partition does not affect the first rollout
    2 A partition=2: none -> +A0, +A1
an unready surplus group makes room for a partition
    2 B stable partition=2: A0 serving, B1 unready, B2 unready -> -B2, +A2
a retired surplus group does not count as serving when outdated groups are retired
    2 B stable partition=1: A0 partly_routed, B1 serving, B2 serving, C3 serving -> -B2, -A0
a surplus group that never served is retired at once under a partition
    2 B stable partition=2: A0 serving, A1 starting, B2 starting -> -B2
a partition larger than min_available stays whole before the updated revision serves
    2 B stable max_unavailable=1 partition=2: A0 serving, A1 serving -> none

# The rollout is paused.
a pause does not affect the first rollout
    1 A paused: none -> +A0
a paused rollout retires outdated groups beyond the number of groups
    2 B stable paused: A0 serving, A1 serving, B2 serving -> -A1
a paused rollout stays as it is
    2 B stable paused: A0 serving, B2 serving -> none
a rollout that is paused from the start creates nothing
    1 B stable paused: A0 serving -> none
a scale-up during a pause creates stable groups
    3 B stable paused: A0 serving, B2 serving -> +A1
a scale-down during a pause retires stable groups
    1 B stable paused: A0 serving, B2 serving -> -A0
a pause does not stop a revert
    2 A stable paused: A0 serving, B2 serving -> +A1
a scale-down during a pause retires updated groups if there are no others
    1 B stable paused: B0 serving, B1 serving -> -B1

# Golden prompts are asked.
a group that failed verification is replaced if its revision serves
    2 B stable verified: A0 serving, B1 serving, B2 failed_verification -> -B2, +B2-1
a group that failed other golden prompts stays to be asked again
    2 B stable verification_id=others: A0 serving, A1 serving, B2 failed_verification -> none
a failed revision is deleted and the stable one restored
    1 B stable verification_failed: B2 failed_verification, B3 awaiting_verification -> -B2, -B3, +A0
a failed first revision is deleted
    2 B verification_failed: B0 failed_verification, B1 starting -> -B0, -B1
a failed first revision is not created again
    2 B verification_failed: none -> none
a failed revision stays with pause_on_failure
    2 B stable verification_failed pause_on_failure: A0 serving, A1 serving, B2 failed_verification -> none
stable groups are restored beside a failed revision with pause_on_failure
    2 B stable verification_failed pause_on_failure: A0 serving, B2 failed_verification -> +A1
no group of a failed revision backs off with pause_on_failure
    2 B stable_revision=B verification_failed pause_on_failure: B0 failed_verification, B1 backing_off -> -B1
no group of a failed revision that has served backs off
    2 B stable_revision=B verification_failed: B0 serving, B1 backing_off -> -B1
a group of a failed revision that has served stays
    1 B verification_failed: B0 serving -> none
a failed revision that has served is scaled down
    1 B verification_failed: B0 serving, B1 serving -> -B1
a single failed group is replaced with pause_on_failure if its revision serves
    2 B stable verified pause_on_failure: A0 serving, B1 serving, B2 failed_verification -> -B2, +B2-1
a stable group awaiting verification is replaced
    2 B stable: A0 serving, A1 awaiting_verification, B2 starting -> -A1, +A1-1
the stable revision is restored from nothing after a failed verification
    1 B stable verification_failed: none -> +A0
outdated groups stay after a failed verification even if no revision is stable
    1 B verification_failed: A0 mismatched -> none
a group that failed verification once and passed it later stays
    1 B verified: B0 reverified -> none

# Groups exceeded their restart budget.
a group abandoned before its revision served is deleted
    2 B stable abandoned=2: A0 serving, A1 serving, B2 crashing -> -B2
the stable revision is restored after a group was abandoned
    2 B stable abandoned=2: A0 serving -> +A1
abandoned groups are not restored after a revert
    2 A stable abandoned=0,1: B2 serving -> none
an abandoned group is deleted while others serve
    3 A stable abandoned=1: A0 serving, A1 crashing, A2 serving -> -A1
a terminating group is replaced while another one is abandoned
    3 A stable abandoned=1: A0 serving, A2 terminating -> +A2-1
a scale-down keeps a serving group while another one is abandoned
    1 A stable abandoned=1: A0 serving -> none
an abandoned group that serves again stays
    2 A stable abandoned=1: A0 serving, A1 serving -> none
an abandoned group that serves again does not reduce the number of groups
    3 A stable abandoned=1: A1 serving -> +A0, +A2
no group is created under an abandoned index
    3 A stable abandoned=1: A0 serving, A2 serving -> none
a first rollout continues with the groups that are not abandoned
    2 A abandoned=1: none -> +A0
an abandoned group is not created under another index
    2 B stable abandoned=1: A0 serving, B2 serving -> none
an abandoned partly created group is deleted, not completed
    2 B stable abandoned=2: A0 serving, A1 serving, B2 partly_created -> -B2
an abandoned group of a failed revision is deleted once
    1 B stable verification_failed abandoned=1: A0 serving, B1 starting -> -B1
outdated groups stay after a group was abandoned even if no revision is stable
    1 B abandoned=1: A0 mismatched -> none
a revision that serves continues with the groups that are not abandoned
    3 B stable abandoned=2: A0 serving, A1 serving, B3 serving -> +B4
an abandoned index is free for the stable revision
    1 B stable abandoned=0: none -> +A0

# Ended groups back off.
a stable group that ended at once backs off
    1 B stable: A0 backing_off -> +B1
a stable group that backs off counts towards the surge
    2 B stable: A3 backing_off -> +A0, +B1
an updated group that backs off counts towards the surge
    2 B stable: B3-1 backing_off -> +A0, +A1
a stable group that backs off does not replace a starting one
    1 B stable: A0 starting, A1 backing_off, B2 starting -> -A1
a stable group that backs off does not replace a serving one
    1 B stable: A0 serving, A1 backing_off, B2 starting -> -A1

# Names that are taken, and the reasons of actions.
a first group is missing
    1 A: none -> +A0 Missing
a taken name is skipped
    1 A taken=demo-A-0-0,demo-A-0-1: none -> +A0-2 Missing
a name that a further pod of the group needs is skipped
    1 A taken=demo-A-0-0-1: none -> +A0-1 Missing
an ended group is replaced with reasons
    1 A: A0 ended -> -A0 Ended, +A0-1 Replaces
a partly created group is incomplete
    1 A: A0 partly_created -> +A0 Incomplete
a starting outdated group is superseded
    0 B: A0 starting -> -A0 Superseded
a group too many is surplus
    0 A: A0 serving -> -A0 Surplus
an outdated group is replaced once the updated one serves
    1 B stable: A0 serving, B1 serving -> -A0 Replaced
a missing stable group is restored
    1 B stable: B1 starting -> +A0 Restored
an abandoned group is given up
    1 B stable abandoned=1: A0 serving, B1 crashing -> -B1 GivenUp
every group of a failed revision that never served is refused
    1 B stable verification_failed: A0 serving, B1 starting -> -B1 Refused
"""
)
