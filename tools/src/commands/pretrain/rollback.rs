//! `--ckpt-step` with restarts: restarted ranks continue from the latest checkpoint of the run, not
//! again from that step.

use std::ffi::OsString;

use megatron::checkpoint;
use megatron::config::RunConfig;

use crate::cli::Resolved;
use crate::error::{Error, Result};
use crate::launch::{MAX_RESTARTS, OWN_RANKS};

/// Tells ranks which checkpoint was the latest when their supervisor started.
const LAST_SAVE: &str = "MEGATRON_LAST_SAVE";

/// Environment variables for ranks that may be restarted.
pub fn variables(resolved: &Resolved) -> Vec<(OsString, OsString)> {
    match (&resolved.run.checkpoint.save, resolved.run.checkpoint.ckpt_step) {
        (Some(save), Some(_)) if resolved.distributed.max_restarts > 0 => {
            vec![(LAST_SAVE.into(), checkpoint::last_save(save).into())]
        }
        _ => vec![],
    }
}

/// Ignores the step to go back to once the run has saved a checkpoint itself.
///
/// # Errors
/// If a launcher may restart the ranks: they would go back to the step each time.
pub fn go_on_after_restart(run: &mut RunConfig) -> Result<()> {
    let settings = &mut run.checkpoint;
    let (Some(step), Some(save), Some(load)) = (settings.ckpt_step, &settings.save, &settings.load)
    else {
        return Ok(());
    };
    if !checkpoint::same_folder(load, save) {
        return Ok(());
    }
    if let Some(before) = std::env::var_os(LAST_SAVE) {
        if before != OsString::from(checkpoint::last_save(save)) {
            settings.ckpt_step = None;
        }
        return Ok(());
    }
    let restarts =
        std::env::var(MAX_RESTARTS).ok().and_then(|times| times.parse().ok()).unwrap_or(0u32);
    if restarts > 0 && std::env::var_os(OWN_RANKS).is_none() {
        return Err(Error::usage(format!(
            "--ckpt-step {step}: this launcher may restart ranks ({MAX_RESTARTS} = {restarts}), \
             and each restart would go back to step {step}; give the launcher --max-restarts 0, or \
             start the ranks with `megatron pretrain --max-restarts`"
        )));
    }
    Ok(())
}
