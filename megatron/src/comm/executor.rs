//! Runs a group's collectives one after the other, in the order issued, beside the computation.
//!
//! Whoever waits runs the front of the queue itself; a worker thread makes progress when nobody waits. Waking the worker for an
//! operation that its caller waits for at once would cost more than a small operation takes, so a group whose last operation
//! was waited for at once gives the next one a moment before the worker takes it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kernels::trace::{Kind, span};

use super::communicator::{Pending, Work};
use super::inbox::lock;
use crate::{Error, Result};

/// How long an operation that is expected to be waited for is left to its caller.
const GRACE: Duration = Duration::from_millis(1);

type Job = Box<dyn FnOnce() -> Result<()> + Send>;

struct Task {
    submitted: Instant,
    job: Mutex<Option<Job>>,
    result: Mutex<Option<Result<()>>>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Arc<Task>>,
    running: bool,
    stop: bool,
    /// Operations ever submitted.
    submitted: u64,
    /// Threads that sleep until an operation completes.
    waiting: usize,
    /// The worker sleeps until it is woken.
    asleep: bool,
    /// The last operation was not waited for at once, so the worker is woken for the next.
    hurry: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// An operation is complete.
    completed: Condvar,
    /// The worker has something to do.
    work: Condvar,
}

impl Shared {
    /// Runs the front of the queue.
    fn run<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some(task) = state.queue.pop_front() else { return state };
        state.running = true;
        drop(state);
        task.run();
        let mut state = lock(&self.state);
        state.running = false;
        if state.waiting > 0 {
            self.completed.notify_all();
        }
        if state.stop || !state.queue.is_empty() {
            self.work.notify_one();
        }
        state
    }

    /// Runs the queue until `task` is complete, sleeping while others run it.
    fn complete(&self, task: &Task) {
        let mut state = lock(&self.state);
        state.hurry = state.running || state.queue.len() != 1;
        while lock(&task.result).is_none() {
            state = if state.running || state.queue.is_empty() {
                state.waiting += 1;
                let mut state = self.completed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.waiting -= 1;
                state
            } else {
                self.run(state)
            };
        }
    }

    /// What the worker does until the group is dropped.
    fn work(&self) {
        let mut state = lock(&self.state);
        let mut seen = 0;
        while !(state.stop && state.queue.is_empty() && !state.running) {
            let due = |task: &Arc<Task>| task.submitted.elapsed() >= GRACE;
            if !state.running && state.queue.front().is_some_and(|front| state.hurry || state.stop || due(front)) {
                state.hurry = true;
                state = self.run(state);
            } else if state.submitted == seen && (state.running || state.queue.is_empty()) {
                state.asleep = true;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep = false;
            } else {
                // While operations come one after the other, looking now and then costs less than being woken for each.
                seen = state.submitted;
                state = self.work.wait_timeout(state, GRACE).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Task {
    fn run(&self) {
        let Some(job) = lock(&self.job).take() else { return };
        let result = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|_| {
            Err(Error::comm("a collective panicked; this is a defect of the runtime, please report it"))
        });
        *lock(&self.result) = Some(result);
    }
}

/// The queue of one group and its worker thread, which starts with the first operation.
#[derive(Default)]
pub(crate) struct Executor {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Executor {
    /// Queues `job`; operations of one thread run in the order it submits them.
    ///
    /// # Errors
    /// If the worker thread cannot be started.
    pub fn submit(&self, name: &str, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<Work> {
        let mut worker = lock(&self.worker);
        if worker.is_none() {
            let shared = self.shared.clone();
            let started = std::thread::Builder::new().name(format!("comm-{name}")).spawn(move || shared.work());
            *worker = Some(started.map_err(|e| Error::comm(format!("group {name}: cannot start its thread: {e}")))?);
        }
        drop(worker);
        let (job, result) = (Mutex::new(Some(Box::new(job) as Job)), Mutex::new(None));
        let task = Arc::new(Task { submitted: Instant::now(), job, result });
        let mut state = lock(&self.shared.state);
        state.queue.push_back(task.clone());
        state.submitted += 1;
        if state.asleep || state.hurry {
            self.shared.work.notify_one();
        }
        drop(state);
        Ok(Work::pending(Submitted { shared: self.shared.clone(), task }))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.work.notify_one();
        if let Some(worker) = lock(&self.worker).take() {
            // Jobs catch their panics, so there is nothing to learn from the thread's result.
            let _ = worker.join();
        }
    }
}

struct Submitted {
    shared: Arc<Shared>,
    task: Arc<Task>,
}

impl Pending for Submitted {
    fn wait(self: Box<Self>) -> Result<()> {
        let _span = span("wait for a collective", Kind::Wait);
        self.shared.complete(&self.task);
        lock(&self.task.result).take().unwrap_or(Ok(()))
    }

    fn detach(self: Box<Self>) {}
}
