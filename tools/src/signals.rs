//! SIGINT, SIGTERM and SIGHUP in a rank: a flag that the training loop reads between steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::{Error, Result};
use crate::launch::is_ignored;

/// What the signals so far ask for.
#[derive(Clone, Debug)]
pub struct StopSignal {
    /// Set once the run shall save and stop.
    pub flag: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl StopSignal {
    /// Takes SIGINT, SIGTERM and SIGHUP, unless they are ignored, as wishes to stop; SIGINT after one of them ends the process at once.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn listen() -> Result<Self> {
        let stop = Self { flag: Arc::default(), signal: Arc::default() };
        let register = || -> std::io::Result<()> {
            let signals = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal));
            let signals: Vec<i32> = signals.collect();
            if signals.contains(&SIGINT) {
                // Actions run in the order of registration: the first SIGINT finds the flag not yet set.
                flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&stop.flag))?;
            }
            for signal in signals {
                // systemd sends SIGHUP after another, which is what the run was stopped by.
                if signal != SIGHUP {
                    flag::register_usize(signal, Arc::clone(&stop.signal), signal as usize)?;
                }
                flag::register(signal, Arc::clone(&stop.flag))?;
            }
            Ok(())
        };
        register().map_err(|source| Error::Io { action: "listen for signals".to_string(), source })?;
        Ok(stop)
    }

    /// The exit code of a run that was stopped: 128 + the signal.
    pub fn exit_code(&self) -> u8 {
        match self.signal.load(Ordering::SeqCst) {
            0 if self.flag.load(Ordering::SeqCst) => 128 + SIGHUP as u8,
            // Another rank was told.
            0 => 128 + SIGTERM as u8,
            signal => 128 + signal as u8,
        }
    }
}
