//! Progress messages of a rank that waits for others at the start.

use std::time::{Duration, Instant};

/// Time until the first message: longer than ranks that start together need.
const FIRST: Duration = Duration::from_secs(10);
/// Time between further messages.
const AGAIN: Duration = Duration::from_secs(60);
/// Maximum number of runs of consecutive ranks in a message.
const NAMED: usize = 8;

/// Receives a line for the user who watches the run.
pub type Notify = fn(&str);

/// Reports periodically what a rank waits for.
pub(crate) struct Waiting {
    notify: Option<Notify>,
    begun: Instant,
    next: Duration,
}

impl Waiting {
    pub fn new(notify: Option<Notify>) -> Self {
        Self { notify, begun: Instant::now(), next: FIRST }
    }

    /// Reports `line` at once.
    pub fn say(&self, line: &str) {
        self.notify.into_iter().for_each(|notify| notify(line));
    }

    /// Reports the result of `what`, if a message is due.
    pub fn notify(&mut self, what: impl FnOnce() -> String) {
        let waited = self.begun.elapsed();
        if let Some(notify) = self.notify.filter(|_| waited >= self.next) {
            self.next = waited + AGAIN;
            notify(&format!("{} ({:.0} s so far)", what(), waited.as_secs_f64()));
        }
    }
}

/// Describes `ranks`, in ascending order; runs of consecutive ranks are given by their ends.
pub(crate) fn in_words(ranks: &[usize]) -> String {
    let runs: Vec<_> = ranks.chunk_by(|a, b| a + 1 == *b).collect();
    let mut words: Vec<String> = Vec::new();
    for run in runs.iter().take(NAMED) {
        words.push(match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run[0].to_string(),
        });
    }
    if runs.len() > NAMED {
        words.push("…".into());
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn who_waits_says_so_after_ten_seconds_and_every_minute() {
        static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let begun = Instant::now() - Duration::from_secs(75);
        let mut waiting = Waiting {
            notify: Some(|line| TOLD.lock().unwrap().push(line.into())),
            begun,
            next: Duration::from_secs(70),
        };
        (0..3).for_each(|_| waiting.notify(|| "rank 1".into()));
        assert_eq!(*TOLD.lock().unwrap(), ["rank 1 (75 s so far)"]);
        assert!(waiting.next >= Duration::from_secs(135), "{:?}", waiting.next);
        let mut early = Waiting::new(waiting.notify);
        early.notify(|| unreachable!("nobody has waited yet"));
    }

    #[test]
    fn runs_of_ranks_are_named_by_their_ends() {
        assert_eq!(in_words(&[1]), "1");
        assert_eq!(in_words(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        let odd: Vec<usize> = (0..40).map(|i| 2 * i + 1).collect();
        assert_eq!(in_words(&odd), "1, 3, 5, 7, 9, 11, 13, 15, …");
    }
}
