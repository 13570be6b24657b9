//! Runs a schedule on paper: proves that it is complete and cannot hang, and measures its bubble
//! and memory.
//!
//! Messages take no time, so the figures are those of the literature (Huang et al. 2019; Narayanan
//! et al. 2021, §2.2): with M microbatches the idle share of GPipe and 1F1B is (pp − 1) / (M + pp −
//! 1), of interleaved 1F1B (pp − 1) / (v·M + pp − 1).

use std::collections::{HashMap, HashSet};

use super::costs::Costs;
use super::schedule::{Action, Compute, Pass, Payload, Schedule, consumer, producer};
use crate::{Error, Result};

/// One pass on the timeline of a stage, in the unit of the costs; `end` is exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub start: u64,
    pub end: u64,
    pub pass: Pass,
    pub microbatch: usize,
    pub chunk: usize,
}

/// What a schedule costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Time until the last stage is done.
    pub makespan: u64,
    /// Share of all stages' time until then in which they are idle.
    pub bubble: f64,
    /// Per stage, the largest number of forwards (of any chunk) whose backward is still to come; 0
    /// without backward.
    pub peak_in_flight: Vec<usize>,
    /// Per stage, the largest number of input gradients (of any chunk) whose weight gradients are
    /// still to come.
    pub peak_owed: Vec<usize>,
    /// Per stage, the largest number of receives that are posted and whose message no pass has
    /// taken.
    pub peak_receives: Vec<usize>,
    /// Passes of each stage, in order.
    pub timeline: Vec<Vec<Slot>>,
}

/// Runs `schedule` with passes of these costs.
///
/// A schedule that passes runs every (microbatch, chunk) forward and backward exactly once on every
/// stage, the latter whole or as input gradients and later weight gradients, and each chunk's
/// weight gradients in microbatch order; uses only what it has computed or received, and everything
/// that it has; posts the receives of a lane in the order in which its messages are sent; and ends.
/// Posting a receive waits for nothing; the pass that takes the message waits for it.
///
/// # Errors
/// If it does not; the message names the stage and the action, or for a deadlock every stage and
/// what it waits for. If there are not costs for every chunk.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Report> {
    let pp = schedule.pp();
    costs.check(pp, schedule.num_chunks)?;
    let mut lanes = Lanes::new();
    let mut stages: Vec<Stage> = (0..pp).map(|_| Stage::default()).collect();
    let mut next = vec![0; pp]; // index of each stage's next action
    loop {
        let mut progress = false;
        for p in 0..pp {
            while let Some(action) = schedule.stages[p].get(next[p]) {
                let done = stages[p].run(*action, p, schedule, costs, &mut lanes);
                match done.map_err(|why| {
                    Error::config(format!("stage {p}, action {}: {action} {why}", next[p]))
                })? {
                    Outcome::Done => (next[p], progress) = (next[p] + 1, true),
                    Outcome::Waits => break,
                }
            }
        }
        if !progress {
            break;
        }
    }
    let stuck: Vec<_> = (0..pp)
        .filter_map(|p| {
            schedule.stages[p]
                .get(next[p])
                .map(|action| format!("stage {p} at action {} ({action})", next[p]))
        })
        .collect();
    if !stuck.is_empty() {
        return Err(Error::config(format!(
            "the schedule deadlocks: {} wait for ever",
            stuck.join(", ")
        )));
    }
    // Every pass took its input, each output was sent once, and no receive is left over, so no lane
    // holds a message now.
    for (p, stage) in stages.iter().enumerate() {
        stage.check_complete(schedule).map_err(|why| Error::config(format!("stage {p} {why}")))?;
    }
    let makespan = stages.iter().map(|stage| stage.now).max().unwrap_or(0);
    let busy: u64 =
        stages.iter().flat_map(|stage| &stage.slots).map(|slot| slot.end - slot.start).sum();
    let whole = makespan * pp as u64;
    Ok(Report {
        makespan,
        bubble: if whole == 0 { 0.0 } else { (whole - busy) as f64 / whole as f64 },
        peak_in_flight: stages.iter().map(|stage| stage.peak).collect(),
        peak_owed: stages.iter().map(|stage| stage.peak_owed).collect(),
        peak_receives: stages.iter().map(|stage| stage.peak_receives).collect(),
        timeline: stages.into_iter().map(|stage| stage.slots).collect(),
    })
}

/// The result of one check, with what is wrong.
type Checked<T> = std::result::Result<T, String>;
/// (microbatch, chunk)
type Key = (usize, usize);
/// Messages sent, by (from, to, payload), in order; those taken stay in their place.
type Lanes = HashMap<(usize, usize, Payload), Vec<Message>>;

/// A sent message: for which of the receiver's passes, and when it is there.
struct Message {
    key: Key,
    time: u64,
}

enum Outcome {
    Done,
    Waits,
}

/// What one stage has done and holds.
#[derive(Default)]
struct Stage {
    now: u64,
    forwards: HashSet<Key>,
    /// Whole ones and input gradients.
    backwards: HashSet<Key>,
    /// Gradients of weights that are there, by whole backwards or apart.
    weights: HashSet<Key>,
    /// Receives whose message no pass has taken: from which stage, and as the how-manieth of the
    /// lane.
    posted: HashMap<(Payload, Key), (usize, usize)>,
    /// Receives ever posted, by (from, payload).
    receives: HashMap<(usize, Payload), usize>,
    unsent: HashSet<(Payload, Key)>,
    peak: usize,
    peak_owed: usize,
    peak_receives: usize,
    slots: Vec<Slot>,
}

impl Stage {
    /// Runs one action, or says what is wrong with it.
    fn run(
        &mut self,
        action: Action,
        p: usize,
        s: &Schedule,
        costs: &Costs,
        lanes: &mut Lanes,
    ) -> Checked<Outcome> {
        let (pp, v) = (s.pp(), s.num_chunks);
        let (microbatch, chunk) = action.key();
        if microbatch >= s.num_microbatches || chunk >= v {
            return Err(format!(
                "lies outside of {} microbatches and {v} chunks",
                s.num_microbatches
            ));
        }
        let key = (microbatch, chunk);
        if let Some(c) = action.compute() {
            return self.compute(c, p, s, costs, lanes);
        }
        match action {
            Action::Send { what, to, .. } => {
                let Some((stage, chunk)) =
                    consumer(pp, v, what, p, chunk).filter(|(stage, _)| *stage == to)
                else {
                    return Err(String::from("goes to a stage that does not need it"));
                };
                if !self.unsent.remove(&(what, key)) {
                    return Err(String::from(
                        "has nothing to send: it is not computed yet or already sent",
                    ));
                }
                let message = Message { key: (microbatch, chunk), time: self.now };
                lanes.entry((p, stage, what)).or_default().push(message);
            }
            Action::Recv { what, from, .. } => {
                if producer(pp, v, what, p, chunk).is_none_or(|(stage, _)| stage != from) {
                    return Err(String::from("comes from a stage that does not make it"));
                }
                let place = self.receives.entry((from, what)).or_default();
                if self.posted.insert((what, key), (from, *place)).is_some() {
                    return Err(String::from("is posted a second time"));
                }
                *place += 1;
                self.peak_receives = self.peak_receives.max(self.posted.len());
            }
            _ => {}
        }
        Ok(Outcome::Done)
    }

    /// Runs one pass, once the message that it takes is there.
    fn compute(
        &mut self,
        c: Compute,
        p: usize,
        s: &Schedule,
        costs: &Costs,
        lanes: &Lanes,
    ) -> Checked<Outcome> {
        let (pp, v) = (s.pp(), s.num_chunks);
        let Compute { pass, microbatch, chunk } = c;
        let key = (microbatch, chunk);
        self.check_order(c, s)?;
        let what = pass.payload();
        if let Some(what) = what.filter(|what| producer(pp, v, *what, p, chunk).is_some()) {
            let Some(&(from, place)) = self.posted.get(&(what, key)) else {
                return Err(String::from("has no input: it is not received yet"));
            };
            let Some(message) = lanes.get(&(from, p, what)).and_then(|lane| lane.get(place)) else {
                return Ok(Outcome::Waits);
            };
            if message.key != key {
                let (microbatch, chunk) = message.key;
                return Err(format!(
                    "gets the message for microbatch {microbatch}, chunk {chunk}: receives are posted in another order than \
                     messages are sent"
                ));
            }
            self.now = self.now.max(message.time);
            self.posted.remove(&(what, key));
        }
        let costs = costs.of(p, chunk);
        let cost = match pass {
            Pass::Forward => {
                self.forwards.insert(key);
                costs.forward
            }
            Pass::Backward => {
                self.backwards.insert(key);
                self.weights.insert(key);
                costs.backward()
            }
            Pass::InputGradients => {
                self.backwards.insert(key);
                costs.input_gradients
            }
            Pass::WeightGradients => {
                self.weights.insert(key);
                costs.weight_gradients
            }
        };
        if let Some(what) = what.filter(|what| consumer(pp, v, *what, p, chunk).is_some()) {
            self.unsent.insert((what, key));
        }
        self.slots.push(Slot { start: self.now, end: self.now + cost, pass, microbatch, chunk });
        self.now += cost;
        if s.has_backward {
            self.peak = self.peak.max(self.forwards.len() - self.backwards.len());
            self.peak_owed = self.peak_owed.max(self.backwards.len() - self.weights.len());
        }
        Ok(Outcome::Done)
    }

    /// Says what is wrong if a pass comes at this time.
    fn check_order(&self, c: Compute, s: &Schedule) -> Checked<()> {
        let Compute { pass, microbatch, chunk } = c;
        let key = (microbatch, chunk);
        let done = match pass {
            Pass::Forward => &self.forwards,
            Pass::Backward | Pass::InputGradients => &self.backwards,
            Pass::WeightGradients => &self.weights,
        };
        if done.contains(&key) {
            return Err(String::from("runs a second time"));
        }
        if pass == Pass::Forward {
            return Ok(());
        }
        if !s.has_backward {
            return Err(String::from("is in a schedule without backward"));
        }
        if !self.forwards.contains(&key) {
            return Err(String::from("comes before its forward"));
        }
        if pass == Pass::WeightGradients && !self.backwards.contains(&key) {
            return Err(String::from("comes before its input gradients"));
        }
        // Gradients of norms and biases are summed with those of inputs, those of weights in the
        // half that has them.
        let sums: &[&HashSet<Key>] = match pass {
            Pass::Backward => &[&self.backwards, &self.weights],
            Pass::InputGradients => &[&self.backwards],
            _ => &[&self.weights],
        };
        if microbatch > 0 && sums.iter().any(|done| !done.contains(&(microbatch - 1, chunk))) {
            return Err(format!(
                "comes before that of microbatch {}; gradients sum in one order",
                microbatch - 1
            ));
        }
        Ok(())
    }

    fn check_complete(&self, s: &Schedule) -> Checked<()> {
        for key in (0..s.num_microbatches)
            .flat_map(|microbatch| (0..s.num_chunks).map(move |chunk| (microbatch, chunk)))
        {
            let missing = if !self.forwards.contains(&key) {
                "forward"
            } else if s.has_backward && !self.backwards.contains(&key) {
                "backward"
            } else if s.has_backward && !self.weights.contains(&key) {
                "weight gradients"
            } else {
                continue;
            };
            return Err(format!(
                "never runs the {missing} of microbatch {}, chunk {}",
                key.0, key.1
            ));
        }
        if let Some((what, (microbatch, chunk))) = self.unsent.iter().min_by_key(|(_, key)| *key) {
            return Err(format!(
                "never sends the {what:?} of microbatch {microbatch}, chunk {chunk}"
            ));
        }
        if let Some((what, (microbatch, chunk))) = self.posted.keys().min_by_key(|(_, key)| *key) {
            return Err(format!(
                "never uses the {what:?} that it receives for microbatch {microbatch}, chunk {chunk}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ChunkCosts, forward_only, gpipe, interleaved, one_f_one_b};
    use super::*;

    /// Every schedule up to 6 stages, 4 chunks and 16 microbatches, with receives late and early:
    /// (kind, pp, v, m, schedule).
    fn all_small() -> Vec<(&'static str, usize, usize, usize, Schedule)> {
        let mut all = Vec::new();
        for pp in 1..=6 {
            for m in 1..=16 {
                all.push(("gpipe", pp, 1, m, gpipe(pp, m).unwrap()));
                all.push(("1f1b", pp, 1, m, one_f_one_b(pp, m, 0).unwrap()));
                for v in 2..=4 {
                    all.extend(
                        interleaved(pp, v, m)
                            .ok()
                            .map(|schedule| ("interleaved", pp, v, m, schedule)),
                    );
                }
            }
        }
        assert!(all.iter().filter(|(kind, ..)| *kind == "interleaved").count() > 50);
        let early: Vec<_> = all
            .iter()
            .map(|(kind, pp, v, m, s)| (*kind, *pp, *v, *m, s.receiving_early()))
            .collect();
        all.extend(early);
        all
    }

    /// Forwards of `f` and backwards of `b` on every chunk.
    fn even(schedule: &Schedule, f: u64, b: u64) -> Costs {
        let chunk = ChunkCosts { forward: f, input_gradients: b, ..ChunkCosts::default() };
        Costs::even(schedule.pp(), schedule.num_chunks, chunk).unwrap()
    }

    fn refusal(schedule: &Schedule) -> String {
        simulate(schedule, &even(schedule, 1, 2)).expect_err("must be refused").to_string()
    }

    #[test]
    fn every_small_schedule_is_complete_and_has_the_bubble_of_the_literature() {
        for (kind, pp, v, m, schedule) in all_small() {
            for (f, b) in [(1, 1), (1, 2), (2, 3)] {
                let report = simulate(&schedule, &even(&schedule, f, b))
                    .unwrap_or_else(|e| panic!("{kind} {pp} {v} {m}: {e}"));
                let bubble = (pp - 1) as f64 / (v * m + pp - 1) as f64;
                assert!(
                    (report.bubble - bubble).abs() < 1e-12,
                    "{kind} pp {pp} v {v} m {m} f {f} b {b}: {} ≠ {bubble}",
                    report.bubble
                );
            }
        }
    }

    #[test]
    fn every_small_schedule_has_the_known_peak() {
        for (kind, pp, v, m, schedule) in all_small() {
            let report = simulate(&schedule, &even(&schedule, 1, 2)).unwrap();
            for stage in 0..pp {
                let peak = match kind {
                    "gpipe" => m,
                    "1f1b" => (pp - stage).min(m),
                    _ => (2 * (pp - stage - 1) + (v - 1) * pp + 1).min(v * m),
                };
                assert_eq!(
                    report.peak_in_flight[stage], peak,
                    "{kind} pp {pp} v {v} m {m} stage {stage}"
                );
            }
        }
    }

    #[test]
    fn every_small_schedule_holds_the_input_of_one_pass_ahead_at_most() {
        for (kind, pp, v, m, schedule) in all_small() {
            let costs = even(&schedule, 1, 2);
            let late = simulate(&schedule, &costs).unwrap().peak_receives;
            let early = simulate(&schedule.receiving_early(), &costs).unwrap().peak_receives;
            for stage in 0..pp {
                assert!(
                    late[stage] <= 2 && early[stage] <= 2,
                    "{kind} pp {pp} v {v} m {m} stage {stage}"
                );
                // Interleaved receives keep to the order in which another stage sends, which may be
                // one ahead of their use.
                assert!(
                    kind == "interleaved"
                        || schedule == schedule.receiving_early()
                        || late[stage] <= 1
                );
            }
        }
    }

    #[test]
    fn every_small_forward_only_schedule_is_complete() {
        for (pp, v) in [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (3, 4), (6, 3)] {
            for m in 1..=16 {
                let schedule = forward_only(pp, v, m).unwrap();
                for schedule in [schedule.receiving_early(), schedule] {
                    let report = simulate(&schedule, &even(&schedule, 1, 2)).unwrap();
                    assert_eq!(report.peak_in_flight, vec![0; pp]);
                    assert!(report.timeline.iter().all(|slots| slots.len() == m * v));
                }
            }
        }
    }

    fn samples() -> Vec<Schedule> {
        let late =
            [gpipe(3, 3).unwrap(), one_f_one_b(3, 4, 0).unwrap(), interleaved(2, 2, 4).unwrap()];
        late.into_iter().flat_map(|schedule| [schedule.receiving_early(), schedule]).collect()
    }

    #[test]
    fn a_schedule_with_any_action_left_out_is_rejected() {
        for schedule in samples() {
            for p in 0..schedule.pp() {
                for i in 0..schedule.stages[p].len() {
                    let mut mutated = schedule.clone();
                    let removed = mutated.stages[p].remove(i);
                    assert!(
                        simulate(&mutated, &even(&mutated, 1, 2)).is_err(),
                        "stage {p} without {removed}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_schedule_with_any_action_twice_is_rejected() {
        for schedule in samples() {
            for p in 0..schedule.pp() {
                for i in 0..schedule.stages[p].len() {
                    let mut mutated = schedule.clone();
                    let action = mutated.stages[p][i];
                    mutated.stages[p].insert(i, action);
                    assert!(
                        simulate(&mutated, &even(&mutated, 1, 2)).is_err(),
                        "stage {p} with {action} twice"
                    );
                }
            }
        }
    }

    #[test]
    fn a_deadlock_names_the_stuck_stages_and_their_actions() {
        let mut schedule = one_f_one_b(2, 1, 0).unwrap();
        // Stage 0 waits for the gradient before it sends the activation that the gradient depends
        // on.
        let send = schedule.stages[0].remove(1);
        schedule.stages[0].push(send);
        assert_eq!(
            refusal(&schedule),
            "the schedule deadlocks: stage 0 at action 2 (backward of microbatch 0, chunk 0), stage 1 at action 1 (forward of \
             microbatch 0, chunk 0) wait for ever"
        );
    }

    #[test]
    fn messages_received_in_another_order_than_sent_are_rejected() {
        let mut schedule = gpipe(2, 2).unwrap().receiving_early();
        schedule.stages[1].swap(0, 1);
        let text = refusal(&schedule);
        assert!(
            text.contains("forward of microbatch 0, chunk 0 gets the message for microbatch 1"),
            "{text}"
        );
    }

    #[test]
    fn backwards_out_of_microbatch_order_are_rejected() {
        let mut schedule = gpipe(1, 2).unwrap();
        schedule.stages[0].swap(2, 3);
        assert!(refusal(&schedule).contains("gradients sum in one order"));
    }

    #[test]
    fn a_backward_before_its_forward_is_rejected() {
        let mut schedule = gpipe(1, 1).unwrap();
        schedule.stages[0].swap(0, 1);
        assert!(refusal(&schedule).contains("comes before its forward"));
    }

    /// A stage's order of passes on one chunk: `F0`, `B0` whole, `I0` and `W0` in halves.
    fn of_passes(order: &str) -> Schedule {
        let pass = |word: &str| Compute {
            pass: match &word[..1] {
                "F" => Pass::Forward,
                "B" => Pass::Backward,
                "I" => Pass::InputGradients,
                _ => Pass::WeightGradients,
            },
            microbatch: word[1..].parse().unwrap(),
            chunk: 0,
        };
        let order: Vec<_> = order.split(' ').map(pass).collect();
        let m = order.iter().map(|c| c.microbatch + 1).max().unwrap();
        Schedule::with_messages(&[order], m, 1)
    }

    #[test]
    fn weight_gradients_come_once_after_their_input_gradients_and_in_microbatch_order() {
        let halves = of_passes("F0 F1 I0 I1 W0 W1");
        assert_eq!(simulate(&halves, &even(&halves, 1, 2)).unwrap().peak_owed, [2]);
        for (order, why) in [
            ("F0 W0 I0", "comes before its input gradients"),
            ("F0 I0 W0 W0", "runs a second time"),
            ("F0 B0 W0", "runs a second time"),
            ("F0 I0", "never runs the weight gradients of microbatch 0"),
            ("F0 F1 I0 I1 W1 W0", "gradients sum in one order"),
            ("F0 F1 I1 I0 W0 W1", "gradients sum in one order"),
            // A whole backward sums the weights', too, before which the first's are to come.
            ("F0 F1 I0 B1 W0", "gradients sum in one order"),
        ] {
            let text = refusal(&of_passes(order));
            assert!(text.contains(why), "{order}: {text}");
        }
    }

    #[test]
    fn messages_to_and_from_the_wrong_stage_are_rejected() {
        let mut schedule = gpipe(3, 1).unwrap();
        schedule.stages[0][1] =
            Action::Send { what: Payload::Activation, microbatch: 0, chunk: 0, to: 2 };
        assert!(refusal(&schedule).contains("goes to a stage that does not need it"));
        for p in [0, 1] {
            let mut schedule = gpipe(3, 1).unwrap();
            schedule.stages[p].insert(
                0,
                Action::Recv { what: Payload::Activation, microbatch: 0, chunk: 0, from: 2 },
            );
            assert!(refusal(&schedule).contains("comes from a stage that does not make it"));
        }
    }

    #[test]
    fn a_send_before_its_result_or_a_second_time_is_rejected() {
        let mut schedule = gpipe(2, 1).unwrap();
        schedule.stages[0].swap(0, 1);
        assert!(refusal(&schedule).contains("has nothing to send"));
        let mut schedule = gpipe(2, 1).unwrap();
        let send = schedule.stages[0][1];
        schedule.stages[0].insert(1, send);
        assert!(refusal(&schedule).contains("has nothing to send"));
    }

    #[test]
    fn a_pass_before_its_input_is_received_is_rejected() {
        let mut schedule = gpipe(2, 1).unwrap();
        schedule.stages[1].swap(0, 1);
        assert!(refusal(&schedule).contains("has no input"));
    }

    #[test]
    fn microbatches_and_chunks_that_do_not_exist_are_rejected() {
        let mut schedule = gpipe(1, 1).unwrap();
        schedule.stages[0].push(Action::Forward { microbatch: 1, chunk: 0 });
        assert!(refusal(&schedule).contains("outside of 1 microbatches"));
    }
}
