//! The signals that stop a run, in a rank: a flag that the training loop reads between steps.

use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use megatron::comm::Group;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

use crate::error::{Error, Result};
use crate::launch::{STOP_SIGNALS, is_ignored, signal_name};

/// The state of the signals so far.
#[derive(Clone, Debug)]
pub struct StopSignal {
    /// Set once the run is to save and stop.
    pub flag: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
    /// The effect of the signals, if this process is to print it.
    does: Option<&'static str>,
    told: Arc<AtomicBool>,
}

impl StopSignal {
    /// Treats [`STOP_SIGNALS`], unless they are ignored, as requests to stop; SIGINT after one of
    /// them ends the process at once. The first signal is answered immediately by a line on stderr
    /// with its effect (`does`), because a step may take long.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn listen(does: Option<&'static str>) -> Result<Self> {
        let stop =
            Self { flag: Arc::default(), signal: Arc::default(), does, told: Arc::default() };
        let register = || -> std::io::Result<()> {
            let signals = STOP_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal));
            let signals: Vec<i32> = signals.collect();
            if signals.contains(&SIGINT) {
                // Actions run in the order of registration: the first SIGINT finds the flag not yet
                // set.
                flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&stop.flag))?;
            }
            for &signal in &signals {
                // systemd sends SIGHUP after another signal; that one stopped the run.
                if signal != SIGHUP {
                    flag::register_usize(signal, Arc::clone(&stop.signal), signal as usize)?;
                }
                flag::register(signal, Arc::clone(&stop.flag))?;
            }
            if does.is_some() {
                stop.tell_at_once(&signals)?;
            }
            Ok(())
        };
        register()
            .map_err(|source| Error::Io { action: "listen for signals".to_string(), source })?;
        Ok(stop)
    }

    /// Starts a thread that prints the effect of the first of `signals`.
    fn tell_at_once(&self, signals: &[i32]) -> std::io::Result<()> {
        let (mut woken, waker) = UnixStream::pair()?;
        for &signal in signals {
            pipe::register(signal, waker.try_clone()?)?;
        }
        let stop = self.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            if woken.read(&mut [0]).is_ok_and(|bytes| bytes > 0) {
                stop.tell();
            }
        })?;
        Ok(())
    }

    /// Prints the effect of the received signal, if not yet done.
    pub fn tell(&self) {
        if let (Some(does), Some(signal)) = (self.does, self.signal())
            && !self.told.swap(true, Ordering::SeqCst)
        {
            // Overwrites a terminal's progress bar, which is drawn again.
            let start = if std::io::stderr().is_terminal() { "\r\x1b[2K" } else { "" };
            let signal = signal_name(signal.into());
            // Standard error may be closed.
            let _ =
                writeln!(std::io::stderr(), "{start}{signal}: {does}; Ctrl-C now stops at once");
        }
    }

    /// The exit code of a process that was stopped: 128 + the signal.
    pub fn exit_code(&self) -> u8 {
        128 + self.signal().unwrap_or(SIGTERM as u8)
    }

    /// The exit code of a run: 128 + the signal, the same on all ranks, whichever rank received it.
    /// A script can look at any rank's code. Collective over `world`.
    pub fn exit_code_of_run(&self, world: &Group) -> u8 {
        // A supervisor passes other signals on as SIGTERM.
        let mine = self.signal().unwrap_or(0);
        let all = world.all_gather_bytes(&[mine]).unwrap_or_else(|_| vec![vec![mine]]);
        let told =
            all.iter().filter_map(|signal| signal.first().copied()).filter(|signal| *signal != 0);
        128 + told.min_by_key(|signal| i32::from(*signal) == SIGTERM).unwrap_or(SIGTERM as u8)
    }

    /// The signal that stopped this rank, if any.
    fn signal(&self) -> Option<u8> {
        match self.signal.load(Ordering::SeqCst) {
            0 => self.flag.load(Ordering::SeqCst).then_some(SIGHUP as u8),
            signal => Some(signal as u8),
        }
    }
}
