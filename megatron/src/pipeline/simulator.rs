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
    /// Inclusive.
    pub start: u64,
    /// Exclusive.
    pub end: u64,
    /// What was computed.
    pub pass: Pass,
    /// From 0.
    pub microbatch: usize,
    /// Among the stage's own, from 0.
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
    pub peak_delayed: Vec<usize>,
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
            "the schedule deadlocks: {} wait forever",
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
        peak_delayed: stages.iter().map(|stage| stage.peak_delayed).collect(),
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
    peak_delayed: usize,
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
            return Err(format!("is outside {} microbatches and {v} chunks", s.num_microbatches));
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
                        "has nothing to send: it is not computed yet, or is already sent",
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
                    "gets the message for microbatch {microbatch}, chunk {chunk}: receives are \
                     posted in a different order than messages are sent"
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
            self.peak_delayed = self.peak_delayed.max(self.backwards.len() - self.weights.len());
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
                "comes before that of microbatch {}; gradients must be summed in one order",
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
mod tests;
