//! Simulates a schedule: proves that it is complete and cannot deadlock, and measures its bubble
//! and memory.
//!
//! Messages take no time, so the results match the literature (Huang et al. 2019; Narayanan et al.
//! 2021, §2.2): with M microbatches the idle share of GPipe and 1F1B is (pp − 1) / (M + pp − 1),
//! and that of interleaved 1F1B is (pp − 1) / (v·M + pp − 1).

use std::collections::{HashMap, HashSet};

use super::costs::Costs;
use super::schedule::{Action, Compute, Pass, Payload, Schedule, consumer, producer};
use crate::{Error, Result};

/// One pass on the timeline of a stage, in the unit of the costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Inclusive.
    pub start: u64,
    /// Exclusive.
    pub end: u64,
    /// The computed pass.
    pub pass: Pass,
    /// Index of the microbatch, from 0.
    pub microbatch: usize,
    /// Index among the stage's own chunks, from 0.
    pub chunk: usize,
}

/// The time and memory that a schedule takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Time until the last stage is done.
    pub makespan: u64,
    /// Idle share of all stages' time until the makespan.
    pub bubble: f64,
    /// Per stage, the largest number of forwards (of any chunk) that wait for their backward; 0
    /// without backward.
    pub peak_in_flight: Vec<usize>,
    /// Per stage, the largest number of input gradients (of any chunk) that wait for their weight
    /// gradients.
    pub peak_delayed: Vec<usize>,
    /// Per stage, the largest number of posted receives with a message that no pass has used yet.
    pub peak_receives: Vec<usize>,
    /// Passes of each stage, in order.
    pub timeline: Vec<Vec<Slot>>,
}

/// Simulates `schedule` with passes of these costs.
///
/// A schedule that passes the simulation has these properties:
/// - Every stage runs every (microbatch, chunk) forward and backward exactly once; the backward is
///   whole, or input gradients and later weight gradients.
/// - Each chunk's weight gradients run in microbatch order.
/// - It uses only what it has computed or received, and uses everything that it has.
/// - It posts the receives of a lane in the order of sending.
/// - It ends. Posting a receive does not wait; the pass that uses the message waits for it.
///
/// # Errors
/// If a property is violated: the message names the stage and the action, or for a deadlock every
/// stage and what it waits for. Also if `costs` do not cover every chunk.
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
    // Every pass used its input, each output was sent once, and no receive is left over. Therefore
    // no lane holds a message now.
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

/// The result of one check, or a description of the violation.
type Checked<T> = std::result::Result<T, String>;
/// (microbatch, chunk)
type Key = (usize, usize);
/// Sent messages by (from, to, payload), in order. Received messages stay in the list.
type Lanes = HashMap<(usize, usize, Payload), Vec<Message>>;

/// A sent message: the receiver's (microbatch, chunk), and its time of arrival.
struct Message {
    key: Key,
    time: u64,
}

enum Outcome {
    Done,
    Waits,
}

/// The completed passes and held values of one stage.
#[derive(Default)]
struct Stage {
    now: u64,
    forwards: HashSet<Key>,
    /// Whole backwards and input gradients.
    backwards: HashSet<Key>,
    /// Computed weight gradients, from whole backwards or separate passes.
    weights: HashSet<Key>,
    /// Posted receives whose message no pass has used: the sending stage, and the index within the
    /// lane.
    posted: HashMap<(Payload, Key), (usize, usize)>,
    /// Number of receives posted so far, by (from, payload).
    receives: HashMap<(usize, Payload), usize>,
    unsent: HashSet<(Payload, Key)>,
    peak: usize,
    peak_delayed: usize,
    peak_receives: usize,
    slots: Vec<Slot>,
}

impl Stage {
    /// Runs one action, or describes the violation.
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

    /// Runs one pass, once its message has arrived.
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

    /// Describes the violation if a pass may not run at this point.
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
        // Gradients of norms and biases are summed in the input-gradient half, those of weights in
        // the weight-gradient half.
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
