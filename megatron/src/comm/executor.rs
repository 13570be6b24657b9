//! Runs a group's collectives one after the other, in the order of issue, in parallel to the
//! computation.
//!
//! A thread that waits runs the front of the queue itself. A worker thread makes progress while no
//! thread waits. Waking the worker costs more than a small operation. Therefore, if the last
//! operation of a group was waited for at once, the worker leaves the next one to its caller for a
//! moment. Such an operation allocates only its job and takes only the queue's lock.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kernels::tensor::trace::{Kind, Part, timed};

use super::communicator::Work;
use super::inbox::lock;
use crate::{Error, Result};

/// Minimum time for which an operation is left to its caller if the caller is expected to wait for
/// it.
const GRACE: Duration = Duration::from_millis(1);
/// Maximum time between two checks by the worker while callers run their own operations. The time
/// doubles after each check, because every check takes a core from a rank that others may wait for.
const PATIENCE: Duration = Duration::from_millis(8);

/// An operation. It receives its number.
type Job = Box<dyn FnOnce(u64) -> Result<()> + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// Number of operations submitted so far. Operations are numbered from 0.
    submitted: u64,
    /// Number of operations completed so far. The queue is first in, first out, so all lower
    /// numbers are complete.
    completed: u64,
    running: bool,
    /// Errors of failed operations, until their waiter takes them.
    failed: Vec<(u64, Error)>,
    /// Operations in progress that no caller will wait for.
    detached: Vec<u64>,
    stop: bool,
    worker: Option<JoinHandle<()>>,
    /// Number of threads that sleep until an operation completes.
    waiting: usize,
    /// Whether the worker sleeps until it is woken.
    asleep: bool,
    /// Whether the worker is woken for the next operation, because the last one was not waited for
    /// at once.
    hurry: bool,
}

impl State {
    /// The number of the operation at the front of the queue, if it can run now.
    fn front(&self) -> Option<u64> {
        (!self.running && !self.queue.is_empty()).then_some(self.completed)
    }

    /// The result of operation `number`, which is complete.
    fn take_result(&mut self, number: u64) -> Result<()> {
        match self.failed.iter().position(|(failed, _)| *failed == number) {
            Some(at) => Err(self.failed.swap_remove(at).1),
            None => Ok(()),
        }
    }

    fn complete(&mut self, result: Result<()>) {
        let number = self.completed;
        let detached = self.detached.iter().position(|detached| *detached == number);
        detached.map(|at| self.detached.swap_remove(at));
        if let (Err(error), None) = (result, detached) {
            self.failed.push((number, error));
        }
        self.completed += 1;
        self.running = false;
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals that an operation is complete.
    completed: Condvar,
    /// Signals that the worker has something to do.
    work: Condvar,
}

impl Shared {
    /// Runs the operation at the front of the queue.
    fn run<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some(job) = state.queue.pop_front() else { return state };
        let number = state.completed;
        state.running = true;
        drop(state);
        let result = catch_unwind(AssertUnwindSafe(|| job(number))).unwrap_or_else(|_| {
            Err(Error::comm(
                "a collective panicked; this is a defect of the runtime, please report it",
            ))
        });
        let mut state = lock(&self.state);
        state.complete(result);
        if state.waiting > 0 {
            self.completed.notify_all();
        }
        if state.stop || !state.queue.is_empty() {
            self.work.notify_one();
        }
        state
    }

    /// Runs the queue until operation `number` is complete. Sleeps while another thread runs it.
    fn complete(&self, number: u64) -> Result<()> {
        let mut state = lock(&self.state);
        state.hurry = state.running || state.queue.len() != 1;
        while state.completed <= number {
            state = if state.running {
                state.waiting += 1;
                let mut state = self.completed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.waiting -= 1;
                state
            } else {
                self.run(state)
            };
        }
        state.take_result(number)
    }

    /// The loop of the worker, until the group is dropped.
    fn work(&self) {
        let mut state = lock(&self.state);
        let mut seen = 0;
        // The operation at the front of the queue, and the time when the worker first saw it there.
        let mut front = (u64::MAX, Instant::now());
        let mut pause = GRACE;
        while !(state.stop && state.queue.is_empty() && !state.running) {
            let number = state.front();
            if number.is_some_and(|number| number != front.0) {
                front = (state.completed, Instant::now());
            }
            if number.is_some() && (state.hurry || state.stop || front.1.elapsed() >= GRACE) {
                state.hurry = true;
                pause = GRACE;
                state = self.run(state);
            } else if state.submitted == seen && number.is_none() {
                state.asleep = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep = false;
            } else {
                // While operations follow each other closely, checking periodically costs less than
                // being woken for each.
                seen = state.submitted;
                let patience = if number.is_some() { GRACE } else { pause };
                pause = (pause * 2).min(PATIENCE);
                state = self
                    .work
                    .wait_timeout(state, patience)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }
}

/// The queue of one group and its worker thread, which starts with the first operation.
#[derive(Default)]
pub(crate) struct Executor(Arc<Shared>);

impl Executor {
    /// Queues `job`, which receives the number of operations submitted before it. Operations of one
    /// thread run in the order of submission.
    ///
    /// # Errors
    /// If the worker thread cannot be started.
    pub fn submit(
        &self,
        name: &str,
        job: impl FnOnce(u64) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        let job: Job = Box::new(job);
        let mut state = lock(&self.0.state);
        if state.worker.is_none() {
            let shared = self.0.clone();
            let started = std::thread::Builder::new()
                .name(format!("comm-{name}"))
                .spawn(move || shared.work());
            state.worker =
                Some(started.map_err(|e| {
                    Error::comm(format!("group {name}: cannot start its thread: {e}"))
                })?);
        }
        let number = state.submitted;
        state.queue.push_back(job);
        state.submitted += 1;
        if state.asleep || state.hurry {
            self.0.work.notify_one();
        }
        drop(state);
        Ok(Work::queued(Submitted { shared: self.0.clone(), number }))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.stop = true;
        let worker = state.worker.take();
        drop(state);
        self.0.work.notify_one();
        if let Some(worker) = worker {
            // Jobs catch their panics, so the thread's result contains nothing to report.
            let _ = worker.join();
        }
    }
}

/// A submitted operation.
pub(crate) struct Submitted {
    shared: Arc<Shared>,
    number: u64,
}

impl Submitted {
    /// Blocks until the operation is complete.
    ///
    /// # Errors
    /// The error of the operation.
    pub fn wait(self) -> Result<()> {
        let _span = timed("wait for a collective", Kind::Wait, Part::Wait);
        self.shared.complete(self.number)
    }

    /// Tells that no caller will wait for the operation; it runs all the same.
    pub fn detach(self) {
        let mut state = lock(&self.shared.state);
        if state.completed <= self.number {
            state.detached.push(self.number);
        } else {
            // The group's next operation reports a failure.
            let _ = state.take_result(self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Time limit in tests for events that should come at once.
    const LONG: Duration = Duration::from_secs(10);

    /// Submits jobs that report their position of submission and their position of execution. Jobs
    /// for which `fails` is true end with an error.
    fn submit(
        executor: &Executor,
        count: u64,
        fails: impl Fn(u64) -> bool,
    ) -> (Vec<Work>, Receiver<(u64, u64)>) {
        let (tell, told) = channel();
        let one = |i| {
            let (tell, fails) = (tell.clone(), fails(i));
            let job = move |number| {
                tell.send((i, number)).map_err(|e| Error::comm(e.to_string()))?;
                if fails { Err(Error::comm(format!("number {i}"))) } else { Ok(()) }
            };
            executor.submit("test", job).unwrap()
        };
        ((0..count).map(one).collect(), told)
    }

    #[test]
    fn operations_run_in_the_order_submitted_whoever_is_waited_for_first() {
        let executor = Executor::default();
        let (mut works, told) = submit(&executor, 5, |_| false);
        works.pop().unwrap().wait().unwrap();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), (0..5).map(|i| (i, i)).collect::<Vec<_>>());
        works.into_iter().for_each(|work| work.wait().unwrap());
    }

    #[test]
    fn an_operation_that_nobody_waits_for_runs_all_the_same() {
        let executor = Executor::default();
        let (works, told) = submit(&executor, 2, |_| false);
        assert_eq!([told.recv_timeout(LONG), told.recv_timeout(LONG)], [Ok((0, 0)), Ok((1, 1))]);
        drop(works);
    }

    #[test]
    fn a_failure_is_told_to_whoever_waits_for_that_operation_alone() {
        let executor = Executor::default();
        let (works, _told) = submit(&executor, 4, |i| i % 2 == 1);
        let results: Vec<_> =
            works.into_iter().rev().map(|work| work.wait().map_err(|e| e.to_string())).collect();
        assert!(results[0].as_ref().is_err_and(|e| e.ends_with("number 3")), "{results:?}");
        assert!(results[2].as_ref().is_err_and(|e| e.ends_with("number 1")), "{results:?}");
        assert!(results[1].is_ok() && results[3].is_ok());
    }

    #[test]
    fn failures_that_nobody_asks_for_are_not_kept() {
        let executor = Executor::default();
        let (works, told) = submit(&executor, 2, |_| true);
        // One is dropped before it runs, the other one afterwards.
        let [first, second] = <[Work; 2]>::try_from(works).ok().unwrap();
        drop(first);
        assert_eq!([told.recv_timeout(LONG), told.recv_timeout(LONG)], [Ok((0, 0)), Ok((1, 1))]);
        while lock(&executor.0.state).completed < 2 {
            std::thread::yield_now();
        }
        drop(second);
        let state = lock(&executor.0.state);
        assert!(state.failed.is_empty() && state.detached.is_empty());
    }

    #[test]
    fn what_is_queued_runs_before_the_group_is_gone() {
        let executor = Executor::default();
        let (works, told) = submit(&executor, 3, |_| false);
        drop(executor);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2)]);
        works.into_iter().for_each(|work| work.wait().unwrap());
    }
}
