//! Adds messages to the passes of a pipeline: a send directly after its result, and a receive
//! directly before its use, or early enough that the message overlaps with a computation.

use std::collections::{HashMap, HashSet, VecDeque};

use super::schedule::{Action, Compute, Payload, Schedule, consumer, producer};

impl Schedule {
    /// The schedule whose stages run `orders`, with receives directly before their use. If a stage
    /// uses the messages of a lane in another order than they are sent, some receives are posted
    /// earlier.
    pub(super) fn with_messages(
        orders: &[Vec<Compute>],
        num_microbatches: usize,
        num_chunks: usize,
    ) -> Self {
        let none_early = |_: usize, _: usize| false;
        Self::with_receives(orders, num_microbatches, num_chunks, none_early)
    }

    /// The same passes, but each input is received before the pass that precedes its use, so that
    /// the message travels during that pass. An input that depends on that very pass is still
    /// received directly before its use. A stage thus holds the input of one pass ahead. No receive
    /// waits, through any other stages, for something that its own stage issues later.
    ///
    /// Use this for transports on which a waiting receive blocks only its own lane.
    pub fn receiving_early(&self) -> Self {
        let orders = self.orders();
        let needed = own_passes_needed(&orders, self.num_chunks);
        let early = |stage: usize, pass: usize| needed[stage][pass] < pass;
        Self::with_receives(&orders, self.num_microbatches, self.num_chunks, early)
    }

    /// `early` tells, for (stage, index of a pass), whether the pass's input is received before the
    /// preceding pass.
    fn with_receives(
        orders: &[Vec<Compute>],
        num_microbatches: usize,
        num_chunks: usize,
        early: impl Fn(usize, usize) -> bool,
    ) -> Self {
        let (pp, v) = (orders.len(), num_chunks);
        let mut lanes = Lanes::new();
        for (stage, order) in orders.iter().enumerate() {
            for c in order {
                let Some(what) = c.pass.payload() else { continue };
                if let Some((to, chunk)) = consumer(pp, v, what, stage, c.chunk) {
                    lanes.entry((stage, to, what)).or_default().push_back((c.microbatch, chunk));
                }
            }
        }
        let mut stages = vec![Vec::new(); pp];
        for (stage, order) in orders.iter().enumerate() {
            let actions = &mut stages[stage];
            let mut posted = HashSet::new();
            for (i, c) in order.iter().enumerate() {
                let next = order.get(i + 1).filter(|_| early(stage, i + 1));
                for c in [Some(c), next].into_iter().flatten() {
                    let Some(what) = c.pass.payload() else { continue };
                    if let Some((from, _)) = producer(pp, v, what, stage, c.chunk) {
                        let lane = lanes.entry((from, stage, what)).or_default();
                        post(what, *c, from, lane, &mut posted, actions);
                    }
                }
                actions.push(c.action());
                let to = c
                    .pass
                    .payload()
                    .and_then(|what| Some((what, consumer(pp, v, what, stage, c.chunk)?.0)));
                if let Some((what, to)) = to {
                    actions.push(Action::Send {
                        what,
                        microbatch: c.microbatch,
                        chunk: c.chunk,
                        to,
                    });
                }
            }
        }
        let has_backward =
            orders.iter().flatten().any(|c| c.pass.payload() == Some(Payload::Gradient));
        Self { stages, num_microbatches, num_chunks, has_backward }
    }
}

/// Messages by (from, to, payload), in the order of sending, each as the receiver's (microbatch,
/// chunk).
type Lanes = HashMap<(usize, usize, Payload), VecDeque<(usize, usize)>>;

/// Posts the receives of a lane up to the one for the input of `c`, unless it is already posted.
fn post(
    what: Payload,
    c: Compute,
    from: usize,
    lane: &mut VecDeque<(usize, usize)>,
    posted: &mut HashSet<(Payload, (usize, usize))>,
    actions: &mut Vec<Action>,
) {
    while !posted.contains(&(what, (c.microbatch, c.chunk))) {
        let Some((microbatch, chunk)) = lane.pop_front() else { break };
        actions.push(Action::Recv { what, microbatch, chunk, from });
        posted.insert((what, (microbatch, chunk)));
    }
}

/// For each pass of each stage: the number of the stage's own first passes that the received input
/// depends on, directly or through other stages. It is 0 if nothing is received, and the number of
/// all passes if the orders never reach that point.
fn own_passes_needed(orders: &[Vec<Compute>], v: usize) -> Vec<Vec<usize>> {
    let pp = orders.len();
    let mut needed: Vec<Vec<usize>> =
        orders.iter().map(|order| vec![order.len(); order.len()]).collect();
    // Number of completed passes per stage, and the number of each stage's first passes that the
    // last completed one depends on.
    let mut made = vec![0; pp];
    let mut past = vec![vec![0; pp]; pp];
    // Dependencies of the input of (microbatch, stage, chunk).
    let mut sent: HashMap<(Payload, usize, usize, usize), Vec<usize>> = HashMap::new();
    loop {
        let mut progress = false;
        for (stage, order) in orders.iter().enumerate() {
            while let Some(c) = order.get(made[stage]) {
                let mut own = 0;
                let taken = c
                    .pass
                    .payload()
                    .filter(|what| producer(pp, v, *what, stage, c.chunk).is_some());
                if let Some(what) = taken {
                    let Some(input) = sent.remove(&(what, c.microbatch, stage, c.chunk)) else {
                        break;
                    };
                    own = input[stage];
                    past[stage]
                        .iter_mut()
                        .zip(input)
                        .for_each(|(past, input)| *past = input.max(*past));
                }
                needed[stage][made[stage]] = own;
                made[stage] += 1;
                past[stage][stage] = made[stage];
                let result = c
                    .pass
                    .payload()
                    .and_then(|what| Some((what, consumer(pp, v, what, stage, c.chunk)?)));
                if let Some((what, (to, chunk))) = result {
                    sent.insert((what, c.microbatch, to, chunk), past[stage].clone());
                }
                progress = true;
            }
        }
        if !progress {
            return needed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Pass, gpipe, interleaved, one_f_one_b};
    use super::*;

    fn forward(microbatch: usize) -> Compute {
        Compute { pass: Pass::Forward, microbatch, chunk: 0 }
    }

    /// Actions of a stage: `a0` receives an activation and `g0` a gradient, `F0` and `B0` are
    /// passes, `>` sends.
    fn words(schedule: &Schedule, stage: usize) -> String {
        let letter = |chunk: usize| {
            if schedule.num_chunks == 1 { String::new() } else { ["a", "b"][chunk].into() }
        };
        let word = |action: &Action| match action {
            Action::Recv { what: Payload::Activation, microbatch, chunk, .. } => {
                format!("a{microbatch}{}", letter(*chunk))
            }
            Action::Recv { what: Payload::Gradient, microbatch, chunk, .. } => {
                format!("g{microbatch}{}", letter(*chunk))
            }
            Action::Forward { microbatch, chunk } => format!("F{microbatch}{}", letter(*chunk)),
            Action::Backward { microbatch, chunk } => format!("B{microbatch}{}", letter(*chunk)),
            Action::InputGradients { microbatch, chunk } => {
                format!("I{microbatch}{}", letter(*chunk))
            }
            Action::WeightGradients { microbatch, chunk } => {
                format!("W{microbatch}{}", letter(*chunk))
            }
            Action::Send { .. } => String::from(">"),
        };
        schedule.stages[stage].iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn receives_are_posted_before_the_pass_that_precedes_their_use() {
        let schedule = one_f_one_b(3, 4, 0).unwrap().receiving_early();
        // The first gradient does not depend on the third forward, so it may arrive during that
        // forward.
        assert_eq!(words(&schedule, 0), "F0 > F1 > g0 F2 > B0 g1 F3 > g2 B1 g3 B2 B3");
        assert_eq!(
            words(&schedule, 1),
            "a0 a1 F0 > g0 F1 > a2 B0 > g1 F2 > a3 B1 > g2 F3 > g3 B2 > B3 >"
        );
        assert_eq!(words(&schedule, 2), "a0 F0 a1 B0 > F1 a2 B1 > F2 a3 B2 > F3 B3 >");
    }

    #[test]
    fn receives_of_what_depends_on_the_preceding_pass_are_posted_after_it() {
        let schedule = gpipe(2, 2).unwrap().receiving_early();
        // Under GPipe every gradient depends on the last forward.
        assert_eq!(words(&schedule, 0), "F0 > F1 > g0 g1 B0 B1");
        assert_eq!(words(&schedule, 1), "a0 a1 F0 F1 B0 > B1 >");
        // Around the ring, each input depends on what was sent two passes ago.
        let schedule = interleaved(2, 2, 2).unwrap().receiving_early();
        assert_eq!(
            words(&schedule, 0),
            "F0a > a0b F1a > a1b F0b > g0b F1b > g1b B0b > g0a B1b > g1a B0a B1a"
        );
    }

    #[test]
    fn receives_follow_the_order_of_the_sender_where_the_receiver_uses_another() {
        let schedule = Schedule::with_messages(
            &[vec![forward(0), forward(1)], vec![forward(1), forward(0)]],
            2,
            1,
        );
        assert_eq!(words(&schedule, 1), "a0 a1 F1 F0");
    }

    #[test]
    fn orders_that_never_end_are_left_to_the_simulator() {
        let backward = |microbatch| Compute { pass: Pass::Backward, microbatch, chunk: 0 };
        // Stage 0 waits for the gradient before it sends the activation that the gradient depends
        // on.
        let orders = [vec![backward(0), forward(0)], vec![forward(0), backward(0)]];
        assert_eq!(
            words(&Schedule::with_messages(&orders, 1, 1).receiving_early(), 0),
            "g0 B0 F0 >"
        );
    }
}
