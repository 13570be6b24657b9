//! The key-value store that ranks use to find each other.

use std::time::{Duration, Instant};

use crate::Result;

/// A small store that every rank of a run can reach.
pub trait Store: Send + Sync {
    /// Sets `key`, replacing its value.
    ///
    /// # Errors
    /// If the store cannot be reached or refuses the key or value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The present value of `key`.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Adds to the decimal number in `key` (0 if unset), atomically for all ranks, and returns the
    /// sum.
    ///
    /// # Errors
    /// As [`Store::set`]; also if `key` does not hold a number.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// The keys that start with `prefix`, sorted.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn list(&self, prefix: &str) -> Result<Vec<String>>;

    /// Reports that no rank needs the store any more. If a process serves the store, possibly on
    /// another machine, its server ends.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn close(&self) -> Result<()> {
        Ok(())
    }

    /// Waits for a value of `key`; `None` if it has none within `timeout`.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn wait(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        poll(timeout, || self.get(key))
    }

    /// Waits until `count` keys start with `prefix`, and returns them; `None` if there are fewer
    /// within `timeout`.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn wait_for(
        &self,
        prefix: &str,
        count: usize,
        timeout: Duration,
    ) -> Result<Option<Vec<String>>> {
        poll(timeout, || Ok(Some(self.list(prefix)?).filter(|keys| keys.len() >= count)))
    }
}

/// Repeats `ask` until it returns a value or `timeout` is over. The first calls follow quickly,
/// later ones at 20 per second.
pub(crate) fn poll<T>(
    timeout: Duration,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let deadline = Instant::now() + timeout;
    let mut pause = Duration::from_millis(1);
    loop {
        let answer = ask()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if answer.is_some() || left.is_zero() {
            return Ok(answer);
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
