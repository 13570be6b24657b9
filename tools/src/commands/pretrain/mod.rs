//! `megatron pretrain`: everything around the training loop.

mod rollback;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use candle_core::Device;
use megatron::comm::{Group, RankInfo};
use megatron::config::{ModelConfig, RunConfig, TensorboardConfig};
use megatron::data::{self, Datasets, SampleCounts, TOKENIZER_FILE, Tokenizer};
use megatron::train::{self, Length, Outcome, RanksHere, Reporter, Sampling, Sources, Trainer};
use megatron::{checkpoint, files};
use models::Gpt;
use models::hf::{self, HfConfig, HfFiles, HfModel};

use super::reshard::describe_layout;
use crate::cli::{Gathered, Resolved, print_config, resolve};
use crate::error::{Error, Result};
use crate::fault;
use crate::inference::continuation::{continued, cut_short};
use crate::inference::ends::ends;
use crate::inference::tokenizer_of;
use crate::launch::{self, MAX_RESTARTS, OWN_RANKS};
use crate::ranks::{self, Joined};
use crate::report::{self, count};
use crate::signals::StopSignal;

/// Runs `pretrain` and returns the exit code to end with.
///
/// # Errors
/// If the settings or data cannot be used, or the run of this process failed.
pub fn run(settings: &Gathered) -> Result<u8> {
    let place = ranks::place()?;
    let mut resolved = resolve(settings, place.as_ref())?;
    if settings.print_config.is_some() {
        if place.is_none_or(|place| place.rank == 0) {
            crate::print_line(print_config::of_run(settings, &resolved)?.trim_end());
        }
        return Ok(0);
    }
    rollback::go_on_after_restart(&mut resolved.run)?;
    if let Some(recorded) = &settings.recorded
        && place
            .as_ref()
            .is_none_or(|place| place.rank == 0 && std::env::var_os(OWN_RANKS).is_none())
    {
        crate::print_line(&describe_recorded(&recorded.origin(), &resolved.run));
    }
    let world_size = resolved.run.parallel.world_size();
    match place {
        Some(place) => rank(resolved, &place, &[]),
        None if world_size == 1 && resolved.distributed.max_restarts == 0 => {
            ranks::check_features(resolved.distributed.device, &resolved.run)?;
            let made = check_outputs(&resolved.run, 0)?;
            rank(resolved, &RankInfo::alone(), &made)
        }
        None => start_ranks(resolved, world_size),
    }
}

/// The note that settings come from a checkpoint, with the folder where this run saves, which the
/// user may not have set.
fn describe_recorded(origin: &str, run: &RunConfig) -> String {
    let saves = match &run.checkpoint.save {
        Some(save) => format!("checkpoints go to {}", save.display()),
        None if run.training.skip_train => "nothing is saved under --skip-train".to_string(),
        None => "nothing is saved without --save".to_string(),
    };
    format!("settings that are not given come from {origin}; {saves}")
}

/// Starts this program once per rank. Errors that can be found without ranks are found here, once.
fn start_ranks(mut resolved: Resolved, world_size: usize) -> Result<u8> {
    ranks::check_number(&resolved.run.parallel)?;
    ranks::check_device(resolved.distributed.device)?;
    ranks::check_features(resolved.distributed.device, &resolved.run)?;
    let made = check_outputs(&resolved.run, 0)?;
    let description = ranks::with_threads(1, || {
        let description = open_data(&mut resolved)?.description;
        require_memory(&resolved, RanksHere { ranks: 0..world_size, others: 0, on_gpus: false })?;
        train::preflight(&resolved.run)?;
        Ok(description)
    })
    .inspect_err(|_: &Error| remove_empty(&made))?;
    resolved.notes.iter().chain(&description).for_each(|line| crate::print_line(line));
    // No time limit: ranks save when they are asked to stop.
    let variables = rollback::variables(&resolved);
    ranks::start(world_size, &resolved.distributed, None, advice(&resolved.run), variables)
}

/// The note for a launcher that restarts ranks less often than the run's settings ask for.
fn not_started_again(max_restarts: u32, rank: usize) -> Option<String> {
    let granted =
        std::env::var(MAX_RESTARTS).ok().and_then(|times| times.parse().ok()).unwrap_or(0u32);
    (rank == 0 && granted < max_restarts).then(|| {
        format!(
            "--max-restarts {max_restarts} is for ranks that `pretrain` starts; use the \
             --max-restarts of the launcher (`megatron launch`, torchrun) instead (here: \
             {granted})"
        )
    })
}

/// What to do after a rank died.
fn advice(run: &RunConfig) -> Option<String> {
    let save = run.checkpoint.save.as_ref()?;
    Some(match &run.checkpoint.load {
        Some(load) if checkpoint::same_folder(load, save) => {
            let command =
                if run.checkpoint.ckpt_step.is_some() { "Without --ckpt-step the" } else { "The" };
            format!(
                "{command} same command continues from the last checkpoint in {}",
                save.display()
            )
        }
        _ => {
            format!(
                "With --load {} the run continues from the last checkpoint there",
                save.display()
            )
        }
    })
}

/// Removes those of `folders` that are empty.
fn remove_empty(folders: &[PathBuf]) {
    for folder in folders {
        // A folder that a run has written to stays.
        let _ = std::fs::remove_dir(folder);
    }
}

/// Before anything is computed, refuses folders that `rank` must write to but cannot. Returns the
/// folders that it created, each before its parent.
fn check_outputs(run: &RunConfig, rank: usize) -> Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    create_outputs(run, rank, &mut made).inspect_err(|_| remove_empty(&made))?;
    Ok(made)
}

fn create_outputs(run: &RunConfig, rank: usize, made: &mut Vec<PathBuf>) -> Result<()> {
    if let (Some(save), Some(_)) = (&run.checkpoint.save, &run.checkpoint.init_from_hf) {
        hf::refuse_model_folder(save)?;
    }
    let metrics = run.logging.metrics.as_deref().filter(|_| rank == 0);
    if let Some(path) = metrics {
        let action = || format!("write metrics to {} (--metrics)", path.display());
        files::check_to_write(path).map_err(|source| Error::Io { action: action(), source })?;
    }
    // For a device, the file itself is opened, not a file beside it.
    let is_special =
        |path: &Path| path.metadata().is_ok_and(|there| !there.is_file() && !there.is_dir());
    let metrics = metrics.filter(|path| !is_special(path)).and_then(Path::parent);
    let metrics = metrics.filter(|folder| !folder.as_os_str().is_empty());
    let tensorboard = run.logging.tensorboard.as_ref().filter(|_| rank == 0);
    let samples = tensorboard.map(TensorboardConfig::samples_dir);
    let tensorboard = tensorboard.map(|tensorboard| tensorboard.dir.as_path());
    let profile = run.logging.profile.as_ref();
    let profile =
        profile.filter(|profile| profile.ranks.is_empty() || profile.ranks.contains(&rank));
    let profile = profile.map(|profile| profile.dir.as_path());
    for folder in
        [run.checkpoint.save.as_deref(), metrics, tensorboard, samples.as_deref(), profile]
            .into_iter()
            .flatten()
    {
        let missing = folder.ancestors().take_while(|folder| {
            !folder.as_os_str().is_empty() && std::fs::symlink_metadata(folder).is_err()
        });
        let missing: Vec<_> = missing.map(Path::to_path_buf).collect();
        made.splice(..0, missing);
        std::fs::create_dir_all(folder)
            .and_then(|()| tempfile::tempfile_in(folder))
            // On a full disk, files can be created but not filled.
            .and_then(|mut file| file.write_all(&[0; 4096]).and_then(|()| file.sync_data()))
            .map_err(|source| Error::Io {
                action: format!("write to the folder {}", folder.display()),
                source,
            })?;
    }
    Ok(())
}

/// Opens the data, which determine the size of the vocabulary.
///
/// A resumed run keeps the vocabulary it was trained with, even if the text that the vocabulary was
/// trained on has changed.
fn open_data(resolved: &mut Resolved) -> Result<Datasets> {
    let run = &mut resolved.run;
    if let Some(folder) = &run.checkpoint.init_from_hf
        && !resumes(run)?
    {
        // Checked before allocating anything with the sizes that config.json claims.
        HfModel::check(&HfConfig::read(folder)?, &HfFiles::open(folder)?)?;
    }
    if run.data.tokenizer.as_deref().is_some_and(|spec| spec.starts_with("train:"))
        && let Some(path) = checkpoint::to_load(&run.checkpoint)?
        && let file = checkpoint::checkpoints_folder(&path)?.join(TOKENIZER_FILE)
        && file.exists()
    {
        run.data.tokenizer = Some(file.to_string_lossy().into_owned());
    }
    if let (Some(folder), None) = (&run.checkpoint.init_from_hf, &run.data.tokenizer)
        && folder.join(TOKENIZER_FILE).exists()
    {
        run.data.tokenizer = Some(folder.join(TOKENIZER_FILE).to_string_lossy().into_owned());
    }
    if run.data.tokenizer.is_none()
        && let Some(path) = checkpoint::to_load(&run.checkpoint)?
        && let (Some(name), trained) = tokenizer_of(&path)?
    {
        resolved.notes.push(format!(
            "note: --tokenizer is not given: {name} is used, the tokenizer of the checkpoint in {}",
            path.display()
        ));
        run.data.tokenizer_options.no_special_tokens |= trained.no_special_tokens;
        run.data.tokenizer_options.split_special_tokens |= trained.split_special_tokens;
        run.data.tokenizer = Some(name);
    }
    let requested = SampleCounts { train: train::samples_to_read(run)?, ..SampleCounts::of(run) };
    let datasets = data::open(
        &run.data,
        run.model.seq_length,
        run.training.seed,
        resolved.vocab_size,
        requested,
    );
    let datasets = datasets.map_err(|error| explain_missing(error, resolved.data_of.as_deref()))?;
    run.model.vocab_size = datasets.vocab_size;
    // An error must come before hours of training, not after.
    if let Some(prompt) = &run.logging.prompt {
        encode_prompt(run, datasets.tokenizer.as_ref(), prompt)?;
    }
    Ok(datasets)
}

/// Refuses a run whose ranks on this machine need more memory than it has.
fn require_memory(resolved: &Resolved, here: RanksHere) -> Result<()> {
    let on_gpus = ranks::on_gpus(resolved.distributed.device);
    Ok(train::require_memory(&resolved.run, &RanksHere { on_gpus, ..here }, || {
        Ok(Gpt::outline_of(&resolved.run))
    })?)
}

/// The ranks on the machine of the rank at `place`, as far as the launcher tells.
fn ranks_here(place: &RankInfo) -> RanksHere {
    let count = place.local_world_size.unwrap_or(1);
    let first = place.local_rank.and_then(|local| place.rank.checked_sub(local));
    // Nearly all launchers assign ranks in blocks.
    match first.filter(|first| first.is_multiple_of(count.max(1))) {
        Some(first) => RanksHere { ranks: first..first + count, others: 0, on_gpus: false },
        None => RanksHere {
            ranks: place.rank..place.rank + 1,
            others: count.saturating_sub(1),
            on_gpus: false,
        },
    }
}

/// Adds advice to `error` if `checkpoint` names data or a tokenizer that do not exist.
fn explain_missing(error: megatron::Error, checkpoint: Option<&Path>) -> megatron::Error {
    match (error, checkpoint) {
        (megatron::Error::Data { path, message }, Some(checkpoint)) if !path.exists() => {
            megatron::Error::data(
                path,
                format!(
                    "{message}. This path is recorded in {}: start in the folder where that run \
                     was started, or give --data-path (--tokenizer)",
                    checkpoint.display()
                ),
            )
        }
        (error, _) => error,
    }
}

/// Opens the data, and refuses what can be refused before ranks meet.
fn prepare(resolved: &mut Resolved, place: &RankInfo) -> Result<Datasets> {
    let datasets = ranks::before_meeting(place, || open_data(resolved))?;
    require_memory(resolved, ranks_here(place))?;
    train::preflight(&resolved.run)?;
    Ok(datasets)
}

/// Runs this process's part. A run that is refused leaves none of the folders `made` for it.
fn rank(mut resolved: Resolved, place: &RankInfo, made: &[PathBuf]) -> Result<u8> {
    kernels::tensor::allocator::keep_freed();
    let datasets = prepare(&mut resolved, place).inspect_err(|_| remove_empty(made))?;
    let communicators = train::most_communicators(&resolved.run.parallel)?;
    let Joined { world, device, .. } =
        ranks::join(place, &resolved.distributed, None, communicators)?;
    // Before this point there is nothing to save, and a signal just ends the process.
    let does =
        if resolved.run.checkpoint.save.is_some() { "saving and stopping" } else { "stopping" };
    // A supervisor has already printed it.
    let says = place.rank == 0 && std::env::var_os(fault::SUPERVISED).is_none();
    let stop = StopSignal::listen(says.then_some(does))?;
    let mut reporter = report::for_rank(place.rank, resolved.run.logging.log_interval);
    // A command that starts its own ranks has already printed it.
    let started_elsewhere = std::env::var_os(OWN_RANKS).is_none();
    if place.rank == 0 && started_elsewhere {
        resolved.notes.iter().for_each(|line| reporter.message(line));
        datasets.description.iter().for_each(|line| reporter.message(line));
    }
    if let Some(note) = not_started_again(resolved.distributed.max_restarts, place.rank) {
        reporter.message(&note);
    }
    if let Some(why) = ranks::issued_late(&resolved.distributed, &device, communicators) {
        reporter.message(&why);
    }
    // Declared here so that a failing rank aborts before its groups are dropped, which would wait
    // for pending operations.
    let mut trainer = None;
    let outcome = run_rank(
        &resolved.run,
        world.clone(),
        &device,
        datasets,
        reporter.as_mut(),
        &stop.flag,
        &mut trainer,
    );
    let failed = |error: Error| {
        // A supervisor finds the cause itself, and adds the advice.
        let advises = error.blames_a_peer() && std::env::var_os(fault::SUPERVISED).is_none();
        let advice = advice(&resolved.run).filter(|_| advises);
        ranks::failed_with_advice(error, advice, &world, &device)
    };
    Ok(match outcome.map_err(failed)? {
        Outcome::Finished | Outcome::ExitInterval | Outcome::ExitDuration => 0,
        Outcome::Interrupted => {
            stop.tell();
            stop.exit_code_of_run(&world)
        }
    })
}

/// Trains, then continues the prompt after all steps. Leaves the trainer in `trainer`.
fn run_rank(
    run: &RunConfig,
    world: Group,
    device: &Device,
    datasets: Datasets,
    reporter: &mut dyn Reporter,
    stop: &AtomicBool,
    trainer: &mut Option<Trainer>,
) -> Result<Outcome> {
    // Must come before operations that only ranks with certain settings run together.
    train::require_alike(&world, run, &datasets.fingerprint)?;
    // Under a launcher, no supervisor has checked this before.
    check_outputs(run, world.rank())?;
    // Must come before anything is written there.
    let lock = run
        .checkpoint
        .save
        .as_ref()
        .map(|save| checkpoint::lock_folder(save, &world))
        .transpose()?;
    if let (0, Some(save)) = (world.rank(), &run.checkpoint.save) {
        place_sidecar_files(run, save, &datasets)?;
    }
    let model = Gpt::of(run, device)?;
    let Datasets { train, valid, test, tokenizer, document_ends, fingerprint, .. } = datasets;
    let sources = Sources { train, valid, test, document_ends, fingerprint };
    let trainer = trainer.insert(Trainer::new(run, &model, world.clone(), &sources, device)?);
    lock.into_iter().for_each(|lock| trainer.hold(lock));
    if let Some(folder) = &run.checkpoint.init_from_hf
        && !resumes(run)?
    {
        let origin = HfModel::open(folder)?;
        origin.load_resized_into(&trainer.stage().params, run.training.seed)?;
        origin.config.note().iter().for_each(|note| reporter.message(note));
        reporter.message(&format!(
            "starting from the weights in {}{}",
            folder.display(),
            resized(&run.model, origin.model())
        ));
    }
    reporter.message(&describe(run, device));
    trainer.count_minutes_from(launch::started());
    let outcome = trainer.run(reporter, stop)?;
    if outcome == Outcome::Interrupted {
        reporter.message(&stopped(run, trainer.progress().iteration));
    }
    if let (Outcome::Finished, Some(prompt)) = (outcome, &run.logging.prompt) {
        match continue_prompt(trainer, run, tokenizer.as_ref(), prompt) {
            Ok((text, note)) => {
                reporter.message(&format!("\n{prompt}{text}"));
                note.iter().for_each(|note| reporter.message(note));
            }
            // Training is done and its result is saved, so this is only a note.
            Err(error) => {
                let note = format!(
                    "note: the run is finished, but its prompt could not be continued: {error}"
                );
                reporter.message(&note);
                ranks::leave_others(&error, &world, device);
            }
        }
    }
    Ok(outcome)
}

/// The step at which a run stopped on request, and what was saved.
fn stopped(run: &RunConfig, step: u64) -> String {
    let folder = run.checkpoint.save.as_ref().map(|save| checkpoint::iteration_dir(save, step));
    let saved = match folder.filter(|folder| folder.exists()) {
        Some(folder) => format!("saved in {}", folder.display()),
        None if run.training.skip_train => "nothing is saved under --skip-train".into(),
        None if run.checkpoint.save.is_none() => "nothing is saved without --save".into(),
        None => "nothing new is saved".into(),
    };
    format!("stopped at step {step}; {saved}")
}

/// The note on how the vocabulary of the weights was resized, if it was.
fn resized(model: &ModelConfig, origin: &ModelConfig) -> String {
    match (model.vocab_size, origin.vocab_size) {
        (here, there) if here > there => {
            format!(
                "; its vocabulary has {there} tokens, and the further ones up to {here} start with random weights"
            )
        }
        (here, there) if here < there => {
            format!("; the first {here} tokens of its vocabulary of {there} are kept")
        }
        _ => String::new(),
    }
}

/// Puts sidecar files beside the run's checkpoints: the tokenizer's, and those of a Hugging Face
/// model.
fn place_sidecar_files(run: &RunConfig, save: &Path, datasets: &Datasets) -> Result<()> {
    let tokenizer = datasets.tokenizer.as_ref();
    if let Some(tokenizer) = tokenizer {
        tokenizer.refuse_to_replace(save)?;
    }
    let same_tokens = |folder: &Path| tokenizer.is_none_or(|tokenizer| tokenizer.lies_in(folder));
    // The files that the tokenizer was opened from take priority over another folder's files of the
    // same tokens.
    let own =
        tokenizer.and_then(|tokenizer| Some((tokenizer, Path::new(tokenizer.name()).parent()?)));
    let own = own.filter(|(tokenizer, folder)| tokenizer.lies_in(folder)).map(|(_, folder)| folder);
    let model = run.checkpoint.init_from_hf.as_deref();
    let apart = own.filter(|own| model.is_none_or(|model| !checkpoint::same_folder(own, model)));
    if let Some(folder) = apart {
        hf::copy_tokenizer(folder, save, model.is_none())?;
    }
    if let Some(folder) = model {
        hf::copy_sidecar_files(folder, save, apart.is_none() && same_tokens(folder))?;
    }
    if let Some(path) = checkpoint::to_load(&run.checkpoint)?
        && let beside = checkpoint::checkpoints_folder(&path)?
        && !checkpoint::same_folder(&beside, save)
    {
        hf::carry_sidecar_files(&beside, save, same_tokens(&beside))?;
    }
    if let Some(tokenizer) = tokenizer {
        tokenizer.save_into(save)?;
    }
    Ok(())
}

/// Whether there is a checkpoint to resume from.
fn resumes(run: &RunConfig) -> megatron::Result<bool> {
    Ok(checkpoint::to_load(&run.checkpoint)?.is_some())
}

/// One line that describes the model and the layout.
fn describe(run: &RunConfig, device: &Device) -> String {
    let (m, p, t) = (&run.model, &run.parallel, &run.training);
    let of = |batch: usize| (batch / (t.micro_batch_size * p.data_parallel_size)) as u64;
    format!(
        "model: {:.1} M parameters in {}, vocabulary {} | {} on {} | {}{} | {}{} of {} · {}",
        m.num_params() as f64 / 1e6,
        count(m.num_layers as u64, "layer"),
        m.vocab_size,
        t.precision,
        kernels::tensor::device::name(device),
        describe_layout(p),
        if p.sequence_parallel && p.tensor_model_parallel_size > 1 {
            " · sequence parallel"
        } else {
            ""
        },
        t.rampup.map_or(String::new(), |rampup| format!("{} to ", of(rampup.start))),
        count(of(t.global_batch_size), "microbatch"),
        t.micro_batch_size,
        count(m.seq_length as u64, "token"),
    )
}

/// At this temperature, a small model neither repeats itself nor produces nonsense.
const TEMPERATURE: f64 = 0.7;
const TOP_K: usize = 40;

/// The prompt's tokens, the tokenizer, and the length of the continuation.
fn encode_prompt<'a>(
    run: &RunConfig,
    tokenizer: Option<&'a Tokenizer>,
    prompt: &str,
) -> Result<(Vec<u32>, &'a Tokenizer, Length)> {
    let tokenizer = tokenizer.ok_or_else(|| {
        Error::usage(
            "--prompt is text, but the data are tokens; give --tokenizer with the tokenizer of the data, or leave --prompt out",
        )
    })?;
    let tokens = tokenizer.encode_prompt(prompt)?;
    let length = Length {
        tokens: run.logging.prompt_tokens,
        window: run.model.seq_length,
        ends: ends(
            tokenizer,
            run.checkpoint.save.as_deref().or(run.checkpoint.init_from_hf.as_deref()),
        )?,
        absent: tokenizer.absent(run.model.vocab_size),
    };
    length
        .check_prompt(&tokens)
        .map_err(|error| Error::usage(format!("--prompt {prompt:?}: {error}")))?;
    Ok((tokens, tokenizer, length))
}

/// The continuation of the prompt, and a note on its length.
fn continue_prompt(
    trainer: &Trainer,
    run: &RunConfig,
    tokenizer: Option<&Tokenizer>,
    prompt: &str,
) -> Result<(String, Option<String>)> {
    let (tokens, tokenizer, length) = encode_prompt(run, tokenizer, prompt)?;
    let sampling =
        Sampling { temperature: TEMPERATURE, top_k: TOP_K, top_p: 1.0, seed: run.training.seed };
    let new = trainer.stage().generate(
        std::slice::from_ref(&tokens),
        &length,
        &sampling,
        &mut |_, _| {},
    )?;
    let new = new.concat();
    Ok((continued(tokenizer, &tokens, &new)?, cut_short(tokens.len(), new.len(), &length)))
}
