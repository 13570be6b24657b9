//! A pipeline schedule as data: for every stage the list of its actions, in order.
//!
//! With pp stages and v chunks per stage, chunk c of stage p is virtual stage c·pp + p. Consecutive
//! virtual stages thus lie on consecutive stages of a ring (Narayanan et al. 2021, §2.2).
//!
//! An engine executes its stage's list and keeps two maps by (payload, microbatch, chunk): receives
//! that are posted and not yet used, and outputs that are not yet sent. A send never waits for its
//! receiver, and a receive never waits for its message; only the pass that uses a message waits for
//! it. Between two stages each payload has its own lane ([`Payload::tag`]). Messages of a lane
//! arrive in the order of sending, and receives take them in the order of posting.

use std::collections::BTreeSet;
use std::fmt;

/// A pass of one chunk over one microbatch. A backward is either whole, or split into input
/// gradients and, at any later time, weight gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// From a chunk's input to its output; activations are saved.
    Forward,
    /// All gradients at once.
    Backward,
    /// Gradients of the input alone, which the previous stage waits for.
    InputGradients,
    /// Gradients of the weights, which are not needed before the step's end.
    WeightGradients,
}

impl Pass {
    /// The payload that this pass consumes and produces, except at the pipeline's ends. `None` for
    /// weight gradients.
    pub fn payload(self) -> Option<Payload> {
        match self {
            Self::Forward => Some(Payload::Activation),
            Self::Backward | Self::InputGradients => Some(Payload::Gradient),
            Self::WeightGradients => None,
        }
    }
}

/// The content of a message between stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// The output of a forward: the input of the next virtual stage's forward.
    Activation,
    /// The gradient of a forward's input: the gradient of the previous virtual stage's output.
    Gradient,
}

impl Schedule {
    /// The kinds of messages that a stage sends, and those that it receives: (other stage, tag),
    /// each once.
    pub fn lanes(&self, stage: usize) -> [Vec<(usize, u32)>; 2] {
        let actions = self.stages.get(stage).into_iter().flatten();
        let sent = actions.clone().filter_map(|action| match *action {
            Action::Send { what, to, .. } => Some((to, what.tag())),
            _ => None,
        });
        let received = actions.filter_map(|action| match *action {
            Action::Recv { what, from, .. } => Some((from, what.tag())),
            _ => None,
        });
        [sent.collect::<BTreeSet<_>>(), received.collect()].map(|lanes| lanes.into_iter().collect())
    }
}

impl Payload {
    /// The message tag of this payload's lane.
    pub fn tag(self) -> u32 {
        match self {
            Self::Activation => 0,
            Self::Gradient => 1,
        }
    }
}

/// One step of a stage. `microbatch` and `chunk` identify the stage's own computation: in
/// [`Action::Send`] the one that produced the payload, in [`Action::Recv`] the one that will use
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "fields mean in all variants what is said above and below")]
pub enum Action {
    /// Runs the chunk forward. Its input is the received activation, or the data on the first
    /// virtual stage.
    Forward { microbatch: usize, chunk: usize },
    /// Runs the chunk backward. Its input is the received gradient, or the loss on the last virtual
    /// stage.
    Backward { microbatch: usize, chunk: usize },
    /// Runs the chunk backward, but leaves the weight-gradient products to
    /// [`Action::WeightGradients`].
    InputGradients { microbatch: usize, chunk: usize },
    /// Computes the gradients that [`Action::InputGradients`] left.
    WeightGradients { microbatch: usize, chunk: usize },
    /// Sends a result to stage `to`, without waiting.
    Send { what: Payload, microbatch: usize, chunk: usize, to: usize },
    /// Posts the receive of an input from stage `from`; the pass that uses the input waits for it.
    Recv { what: Payload, microbatch: usize, chunk: usize, from: usize },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |what: &Payload| match what {
            Payload::Activation => "activation",
            Payload::Gradient => "gradient",
        };
        match self {
            Self::Forward { microbatch, chunk } => {
                write!(f, "forward of microbatch {microbatch}, chunk {chunk}")
            }
            Self::Backward { microbatch, chunk } => {
                write!(f, "backward of microbatch {microbatch}, chunk {chunk}")
            }
            Self::InputGradients { microbatch, chunk } => {
                write!(f, "input gradients of microbatch {microbatch}, chunk {chunk}")
            }
            Self::WeightGradients { microbatch, chunk } => {
                write!(f, "weight gradients of microbatch {microbatch}, chunk {chunk}")
            }
            Self::Send { what, microbatch, chunk, to } => {
                write!(
                    f,
                    "send of the {} of microbatch {microbatch}, chunk {chunk} to stage {to}",
                    kind(what)
                )
            }
            Self::Recv { what, microbatch, chunk, from } => {
                write!(
                    f,
                    "receive of the {} of microbatch {microbatch}, chunk {chunk} from stage {from}",
                    kind(what)
                )
            }
        }
    }
}

/// The actions of every stage of a pipeline in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Actions of each stage, in order.
    pub stages: Vec<Vec<Action>>,
    /// M: microbatches of the step.
    pub num_microbatches: usize,
    /// v: chunks (virtual stages) of each stage.
    pub num_chunks: usize,
    /// Whether every forward has a backward; false in evaluation.
    pub has_backward: bool,
}

/// One pass of a stage. A generator decides only the order of passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Compute {
    pub pass: Pass,
    pub microbatch: usize,
    pub chunk: usize,
}

impl Compute {
    pub(super) fn action(self) -> Action {
        let Self { pass, microbatch, chunk } = self;
        match pass {
            Pass::Forward => Action::Forward { microbatch, chunk },
            Pass::Backward => Action::Backward { microbatch, chunk },
            Pass::InputGradients => Action::InputGradients { microbatch, chunk },
            Pass::WeightGradients => Action::WeightGradients { microbatch, chunk },
        }
    }
}

impl Action {
    /// The microbatch and chunk of the stage's own computation.
    pub(super) fn key(self) -> (usize, usize) {
        match self {
            Self::Forward { microbatch, chunk }
            | Self::Backward { microbatch, chunk }
            | Self::InputGradients { microbatch, chunk }
            | Self::WeightGradients { microbatch, chunk }
            | Self::Send { microbatch, chunk, .. }
            | Self::Recv { microbatch, chunk, .. } => (microbatch, chunk),
        }
    }

    /// The pass of this action; `None` for a message.
    pub(super) fn compute(self) -> Option<Compute> {
        let (pass, microbatch, chunk) = match self {
            Self::Forward { microbatch, chunk } => (Pass::Forward, microbatch, chunk),
            Self::Backward { microbatch, chunk } => (Pass::Backward, microbatch, chunk),
            Self::InputGradients { microbatch, chunk } => (Pass::InputGradients, microbatch, chunk),
            Self::WeightGradients { microbatch, chunk } => {
                (Pass::WeightGradients, microbatch, chunk)
            }
            Self::Send { .. } | Self::Recv { .. } => return None,
        };
        Some(Compute { pass, microbatch, chunk })
    }
}

/// The (stage, chunk) that consumes the payload produced by (stage, chunk); `None` at the
/// pipeline's end.
pub(super) fn consumer(
    pp: usize,
    v: usize,
    what: Payload,
    stage: usize,
    chunk: usize,
) -> Option<(usize, usize)> {
    let virtual_stage = chunk * pp + stage;
    let next = match what {
        Payload::Activation => (virtual_stage + 1 < pp * v).then_some(virtual_stage + 1),
        Payload::Gradient => virtual_stage.checked_sub(1),
    }?;
    Some((next % pp, next / pp))
}

/// The (stage, chunk) that produces the payload consumed by (stage, chunk); `None` if that is the
/// data or the loss.
pub(super) fn producer(
    pp: usize,
    v: usize,
    what: Payload,
    stage: usize,
    chunk: usize,
) -> Option<(usize, usize)> {
    let opposite = match what {
        Payload::Activation => Payload::Gradient,
        Payload::Gradient => Payload::Activation,
    };
    consumer(pp, v, opposite, stage, chunk)
}

impl Schedule {
    /// Number of stages.
    pub fn pp(&self) -> usize {
        self.stages.len()
    }

    /// The passes of each stage, in order.
    pub(super) fn orders(&self) -> Vec<Vec<Compute>> {
        self.stages
            .iter()
            .map(|actions| actions.iter().filter_map(|action| action.compute()).collect())
            .collect()
    }

    /// Whether (stage, chunk) is the first virtual stage, which reads the data and receives no
    /// activation.
    pub fn is_first(&self, stage: usize, chunk: usize) -> bool {
        stage == 0 && chunk == 0
    }

    /// Whether (stage, chunk) is the last virtual stage, which computes the loss and sends no
    /// activation.
    pub fn is_last(&self, stage: usize, chunk: usize) -> bool {
        stage + 1 == self.pp() && chunk + 1 == self.num_chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_stages_walk_the_ring_chunk_by_chunk() {
        assert_eq!(consumer(2, 2, Payload::Activation, 0, 0), Some((1, 0)));
        assert_eq!(consumer(2, 2, Payload::Activation, 1, 0), Some((0, 1)));
        assert_eq!(consumer(2, 2, Payload::Activation, 1, 1), None);
        assert_eq!(consumer(2, 2, Payload::Gradient, 0, 1), Some((1, 0)));
        assert_eq!(consumer(2, 2, Payload::Gradient, 0, 0), None);
        assert_eq!(producer(2, 2, Payload::Activation, 0, 1), Some((1, 0)));
        assert_eq!(producer(2, 2, Payload::Gradient, 1, 1), None);
    }

    #[test]
    fn lanes_are_those_of_the_messages_and_each_has_its_other_end() {
        let schedule = crate::pipeline::one_f_one_b(3, 4, 0).unwrap();
        assert_eq!(schedule.lanes(0), [vec![(1, 0)], vec![(1, 1)]]);
        assert_eq!(schedule.lanes(1), [vec![(0, 1), (2, 0)], vec![(0, 0), (2, 1)]]);
        assert_eq!(crate::pipeline::one_f_one_b(1, 4, 0).unwrap().lanes(0), [vec![], vec![]]);
        let ring = crate::pipeline::interleaved(2, 2, 2).unwrap();
        for (stage, other) in [(0, 1), (1, 0)] {
            assert_eq!(
                ring.lanes(stage),
                [vec![(other, 0), (other, 1)], vec![(other, 0), (other, 1)]]
            );
        }
    }
}
