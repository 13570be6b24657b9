//! Sums over a thread's spans: how much of a step's time each part of it takes.
//!
//! Every moment counts to one part alone: that of the innermost span with a part. Sums therefore
//! add up to the whole time. Nothing is kept per span, except on a GPU, which notes the time at
//! each change of the part; these times are read when the host knows that the step is computed.

use std::cell::RefCell;
#[cfg(gpu)]
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::Device;

use super::{LISTENERS, TIMES, lock};
#[cfg(gpu)]
use crate::tensor::gpu::{Gpu, Timestamp};

/// A part of a training step. Some parts are details of others, see [`Part::whole`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything outside the other parts.
    Other,
    Forward,
    Backward,
    /// Reduction of gradients, and gathers of weights.
    Reduce,
    Optimizer,
    /// Messages and collectives that the computation needs to go on.
    Wait,
    /// Reading a batch, a detail of [`Part::Other`].
    Data,
    /// The output layer and the loss, a detail of [`Part::Forward`].
    OutputForward,
    /// The output layer and the loss, a detail of [`Part::Backward`].
    OutputBackward,
    /// Activations that backward computes again, a detail of [`Part::Backward`].
    Recompute,
    /// Gathers of weights, a detail of [`Part::Reduce`].
    Gather,
    /// Messages from other stages, a detail of [`Part::Wait`].
    Receive,
    /// Messages to other stages, a detail of [`Part::Wait`].
    Send,
}

impl Part {
    const COUNT: usize = Self::Send as usize + 1;

    /// The part that this one is a detail of, or itself.
    pub fn whole(self) -> Self {
        match self {
            Self::Data => Self::Other,
            Self::OutputForward => Self::Forward,
            Self::OutputBackward | Self::Recompute => Self::Backward,
            Self::Gather => Self::Reduce,
            Self::Receive | Self::Send => Self::Wait,
            whole => whole,
        }
    }
}

/// The time of each part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums([Duration; Part::COUNT]);

impl Sums {
    /// The own time of `part`, without its details.
    pub fn of(&self, part: Part) -> Duration {
        self.0[part as usize]
    }

    /// Adds `other`.
    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, time)| *sum += *time);
    }
}

/// The timers of one thread's steps.
#[derive(Clone)]
pub struct Timers(Arc<Mutex<Tally>>);

struct Tally {
    /// Whether details are told apart from their wholes.
    details: bool,
    /// The part that time counts to.
    current: Part,
    /// When that began on the host.
    since: Instant,
    sums: Sums,
    #[cfg(gpu)]
    marks: Option<Marks>,
}

/// Times on a GPU that are not read yet.
#[cfg(gpu)]
struct Marks {
    gpu: Gpu,
    /// The last time that was read.
    last: Option<Timestamp>,
    unread: VecDeque<Mark>,
}

#[cfg(gpu)]
enum Mark {
    /// A time. The time since the previous one counts to a part, if any.
    Until(Option<Part>, Timestamp),
    /// The end of a step.
    End,
}

#[cfg(gpu)]
impl Marks {
    fn until(&mut self, part: Option<Part>) {
        // A failing device reports its error where its results are needed.
        self.unread.extend(self.gpu.timestamp().ok().map(|time| Mark::Until(part, time)));
    }

    /// The sums of the earliest step that is not read. The device must have computed it.
    fn read(&mut self) -> Sums {
        let mut sums = Sums::default();
        while let Some(Mark::Until(part, time)) = self.unread.pop_front() {
            if let (Some(part), Some(last)) = (part, &self.last) {
                sums.0[part as usize] += time.since(last).unwrap_or_default();
            }
            self.last = Some(time);
        }
        sums
    }
}

thread_local! {
    static TIMED: RefCell<Option<Timers>> = const { RefCell::new(None) };
}

impl Timers {
    /// Timers without any time. With `details`, parts that are details of others have sums of their
    /// own.
    pub fn new(details: bool) -> Self {
        Self(Arc::new(Mutex::new(Tally {
            details,
            current: Part::Other,
            since: Instant::now(),
            sums: Sums::default(),
            #[cfg(gpu)]
            marks: None,
        })))
    }

    /// Begins a step, whose spans on this thread count until the guard is dropped. If `device` is a
    /// GPU, the time is that of its computations. Does not wait for it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn enter(&self, device: &Device) -> crate::Result<Timing> {
        let mut tally = lock(&self.0);
        (tally.current, tally.since) = (Part::Other, Instant::now());
        tally.sums = Sums::default();
        #[cfg(gpu)]
        if crate::tensor::gpu::computes(device) {
            if tally.marks.is_none() {
                let gpu = Gpu::on(device, "timers")?;
                tally.marks = Some(Marks { gpu, last: None, unread: VecDeque::new() });
            }
            tally.marks.iter_mut().for_each(|marks| marks.until(None));
        }
        let _ = device;
        drop(tally);
        let before = TIMED.replace(Some(self.clone()));
        LISTENERS.set(LISTENERS.get() | TIMES);
        Ok(Timing { before })
    }

    /// Marks the end of a step's work on a GPU, for [`Timers::lap`].
    pub fn end_step(&self) {
        #[cfg(gpu)]
        {
            let mut tally = lock(&self.0);
            let current = tally.current;
            if let Some(marks) = &mut tally.marks {
                marks.until(Some(current));
                marks.unread.push_back(Mark::End);
            }
        }
    }

    /// The sums of a step, and starts again. On the CPU this is the time since the step began. On a
    /// GPU it is the earliest step that ended and was not read, which the device must have computed.
    pub fn lap(&self) -> Sums {
        let mut tally = lock(&self.0);
        #[cfg(gpu)]
        if let Some(marks) = &mut tally.marks {
            return marks.read();
        }
        tally.charge();
        std::mem::take(&mut tally.sums)
    }
}

impl Tally {
    /// Counts the time so far to the current part.
    fn charge(&mut self) {
        let current = self.current;
        #[cfg(gpu)]
        if let Some(marks) = &mut self.marks {
            return marks.until(Some(current));
        }
        let now = Instant::now();
        self.sums.0[current as usize] += now - self.since;
        self.since = now;
    }

    fn switch(&mut self, part: Part) -> Option<Part> {
        let part = if self.details { part } else { part.whole() };
        // Waiting in a reduction is the reduction's time, and a message's wait is the message's.
        let stays = part == Part::Wait && matches!(self.current.whole(), Part::Reduce | Part::Wait);
        if stays || part == self.current {
            return None;
        }
        self.charge();
        Some(std::mem::replace(&mut self.current, part))
    }
}

/// Counts the thread's time to `part` from now on. Returns the part before, unless nothing changed.
pub(super) fn switch(part: Part) -> Option<Part> {
    TIMED.with_borrow(|timed| lock(&timed.as_ref()?.0).switch(part))
}

/// Counts the thread's time to `part` again, which [`switch`] returned.
pub(super) fn back_to(part: Part) {
    TIMED.with_borrow(|timed| {
        if let Some(timers) = timed {
            let mut tally = lock(&timers.0);
            tally.charge();
            tally.current = part;
        }
    });
}

/// The current thread's spans count while this lives.
#[must_use = "spans no longer count when this is dropped"]
pub struct Timing {
    before: Option<Timers>,
}

impl Drop for Timing {
    fn drop(&mut self) {
        let of = |timers: &Option<Timers>| if timers.is_some() { TIMES } else { 0 };
        LISTENERS.set((LISTENERS.get() & !TIMES) | of(&self.before));
        if let Some(timers) = TIMED.replace(self.before.take()) {
            lock(&timers.0).charge();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Recorder, span, timed, unheard};
    use super::*;

    const PAUSE: Duration = Duration::from_millis(2);

    fn pause() {
        std::thread::sleep(PAUSE);
    }

    /// A step with spans in spans, and the parts that took at least a pause.
    fn taken(details: bool) -> Vec<Part> {
        let timers = Timers::new(details);
        let begin = Instant::now();
        let timing = timers.enter(&Device::Cpu).unwrap();
        {
            let _step = span("step", Kind::Phase);
            let _forward = timed("forward", Kind::Phase, Part::Forward);
            pause();
            {
                let _output = timed("output", Kind::Phase, Part::OutputForward);
                let _wait = timed("wait", Kind::Wait, Part::Wait);
                pause();
            }
            {
                let _reduce = timed("reduce", Kind::Phase, Part::Reduce);
                let _wait = timed("wait", Kind::Wait, Part::Wait);
                pause();
            }
            let _output = timed("output", Kind::Phase, Part::OutputForward);
            pause();
            unheard(|| {
                let _unheard = timed("optimizer", Kind::Phase, Part::Optimizer);
                pause();
            });
        }
        {
            let _receive = timed("receive", Kind::Wait, Part::Receive);
            let _wait = timed("wait", Kind::Wait, Part::Wait);
            pause();
        }
        let sums = timers.lap();
        let whole = begin.elapsed();
        drop(timing);
        assert!(sums.0.iter().sum::<Duration>() <= whole);
        let _outside = timed("forward", Kind::Phase, Part::Forward);
        let parts = [Part::Forward, Part::Reduce, Part::Optimizer, Part::Wait];
        let all = parts.into_iter().chain([Part::OutputForward, Part::Receive]);
        all.filter(|part| sums.of(*part) >= PAUSE).collect()
    }

    #[test]
    fn every_moment_counts_to_the_innermost_part_and_waits_to_what_waits() {
        let wholes = [Part::Forward, Part::Reduce, Part::Wait];
        assert_eq!(taken(false), wholes);
        assert_eq!(taken(true), [&wholes[..], &[Part::OutputForward, Part::Receive]].concat());
    }

    #[test]
    fn a_step_begins_without_the_time_before_it_and_a_profile_records_beside_it() {
        let (timers, recorder) = (Timers::new(false), Recorder::new());
        for _ in 0..2 {
            let _timing = timers.enter(&Device::Cpu).unwrap();
            let _entered = recorder.enter("main");
            drop(timed("forward", Kind::Phase, Part::Forward));
            assert_eq!(timers.lap().of(Part::Backward), Duration::ZERO);
            let _backward = timed("backward", Kind::Phase, Part::Backward);
            pause();
        }
        let names: Vec<_> = recorder.take().iter().map(|event| event.name).collect();
        assert_eq!(names, ["forward", "backward", "forward", "backward"]);
        assert_eq!(LISTENERS.get(), 0);
    }
}
