//! The hardware queues of a GPU. Without enough queues, no operation may be issued before it is
//! needed.

use crate::error::{Error, Result};
use crate::launch::{GPU_QUEUES, MOST_GPU_QUEUES};

/// CUDA's default.
const DEFAULT_GPU_QUEUES: usize = 8;
/// Streams per communicator: one that operations are queued on, and two of NCCL
/// (`ncclSharedResources`).
const COMMUNICATOR_STREAMS: usize = 3;
/// Other streams of a rank: computation, copies to and from the host, and NCCL's stream for launch
/// order.
const OTHER_STREAMS: usize = 4;

/// The hardware queues of a rank's GPU, and the streams that need one each.
#[derive(Clone, Copy)]
pub struct Queues {
    there: usize,
    needed: usize,
}

impl Queues {
    /// The number of queues in `setting`.
    pub fn found(setting: Option<String>, communicators: usize) -> Self {
        let there = setting.and_then(|queues| queues.parse().ok()).unwrap_or(DEFAULT_GPU_QUEUES);
        Self {
            there: there.min(MOST_GPU_QUEUES),
            needed: COMMUNICATOR_STREAMS * communicators + OTHER_STREAMS,
        }
    }

    pub fn suffice(self) -> bool {
        self.there >= self.needed
    }

    /// What is wrong, and what to do.
    pub fn missing(self) -> String {
        let remedy = if self.needed <= MOST_GPU_QUEUES {
            "set it to 32, or start the ranks with `megatron`, which sets it"
        } else {
            "CUDA has no more than 32"
        };
        let (there, needed) = (self.there, self.needed);
        format!(
            "the streams of this layout need {needed} GPU queues, but {GPU_QUEUES} gives {there}: {remedy}"
        )
    }
}

/// Whether operations are issued before they are needed, given the flag `asked`.
///
/// # Errors
/// If the flag asks for it but operations could wait for each other forever.
pub fn overlaps(asked: Option<bool>, over_nccl: bool, queues: Queues) -> Result<bool> {
    if !over_nccl {
        return Ok(asked.unwrap_or(false));
    }
    if asked == Some(true) && !queues.suffice() {
        return Err(Error::usage(format!(
            "--overlap-communication: {}; or leave the flag out. Streams that share a queue would wait for each other",
            queues.missing()
        )));
    }
    Ok(asked.unwrap_or_else(|| queues.suffice()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communication_is_issued_early_over_nccl_with_enough_queues_only() {
        let queues = |n: &str, communicators| Queues::found(Some(n.to_string()), communicators);
        // The world and the group of replicas: 3 streams each, plus 4.
        assert!(overlaps(None, true, queues("10", 2)).unwrap());
        assert!(!overlaps(None, true, queues("9", 2)).unwrap());
        assert!(!overlaps(None, true, queues("1", 2)).unwrap(), "Megatron-LM's advice is 1");
        assert!(!overlaps(None, true, Queues::found(None, 2)).unwrap(), "CUDA's default is 8");
        assert!(
            !overlaps(None, false, queues("32", 2)).unwrap(),
            "a CPU's ranks have no time to spare"
        );
        assert!(!overlaps(Some(false), true, queues("32", 2)).unwrap());
        assert!(overlaps(Some(true), false, Queues::found(None, 2)).unwrap());
        let refusal =
            overlaps(Some(true), true, queues("1", 2)).expect_err("could hang").to_string();
        assert!(
            refusal.contains("need 10 GPU queues")
                && refusal.contains("CUDA_DEVICE_MAX_CONNECTIONS gives 1"),
            "{refusal}"
        );
        assert!(refusal.contains("set it to 32"), "{refusal}");
    }

    #[test]
    fn a_layout_of_more_streams_than_cuda_has_queues_issues_nothing_early() {
        let queues = |communicators| Queues::found(Some("64".to_string()), communicators);
        assert!(
            overlaps(None, true, queues(9)).unwrap(),
            "tp 2 · dp 2 · pp 4, interleaved, takes 31"
        );
        assert!(!overlaps(None, true, queues(10)).unwrap(), "another group would take 34");
        let refusal = overlaps(Some(true), true, queues(10)).expect_err("could hang").to_string();
        assert!(
            refusal.contains("need 34 GPU queues") && refusal.contains("no more than 32"),
            "{refusal}"
        );
    }
}
