//! `megatron pretrain`: everything around the training loop.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use candle_core::{DType, Device};
use megatron::checkpoint;
use megatron::comm::rendezvous::StoreServer;
use megatron::comm::{self, CommOptions, Group, RankInfo, Rendezvous};
use megatron::config::RunConfig;
use megatron::data::{self, Datasets, TOKENIZER_FILE, Tokenizer};
use megatron::train::{self, Outcome, Reporter, Sampling, Sources, Trainer};
use models::Gpt;

use crate::cli::{Distributed, Gathered, Resolved, resolve};
use crate::error::{Error, Result};
use crate::launch::{Plan, STORE_SERVED, Style, supervise};
use crate::report;
use crate::signals::StopSignal;

/// More ranks on one machine are taken for a mistake.
const MOST_RANKS: usize = 1024;

/// Runs `pretrain` and returns the exit code to end with.
///
/// # Errors
/// If the settings or data cannot be used, or the run of this process failed.
pub fn run(settings: &Gathered) -> Result<u8> {
    let place = RankInfo::from_env(environment)?;
    let resolved = resolve(settings, place.as_ref())?;
    let world_size = resolved.run.parallel.world_size();
    match place {
        Some(place) => rank(resolved, &place),
        None if world_size == 1 => {
            check_outputs(&resolved.run)?;
            rank(resolved, &RankInfo::alone())
        }
        None => start_ranks(resolved, world_size),
    }
}

/// Starts this program once per rank. Whatever can be wrong without ranks is found here, once.
fn start_ranks(mut resolved: Resolved, world_size: usize) -> Result<u8> {
    if world_size > MOST_RANKS {
        let p = &resolved.run.parallel;
        return Err(Error::usage(format!(
            "tp {} · cp {} · dp {} · pp {} = {world_size} ranks are too many for one machine; start them with a launcher",
            p.tensor_model_parallel_size, p.context_parallel_size, p.data_parallel_size, p.pipeline_model_parallel_size
        )));
    }
    check_outputs(&resolved.run)?;
    for line in open_data(&mut resolved)?.description {
        crate::print_line(&line);
    }
    train::preflight(&resolved.run)?;
    // Serving the store here rather than in rank 0 leaves no moment in which another program can take the port.
    let store = match resolved.distributed.rendezvous {
        None => Some(StoreServer::bind("127.0.0.1", 0)?),
        Some(_) => None,
    };
    let program = std::env::current_exe()
        .map_err(|source| Error::Io { action: "find the program that is running".to_string(), source })?;
    let mut command = vec![program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    supervise(&Plan {
        command,
        local_ranks: world_size,
        nodes: 1,
        node_rank: 0,
        master: ("127.0.0.1".to_string(), store.as_ref().map_or(0, |store| store.address().port())),
        serves_store: store.is_some(),
        style: Style::Run,
        self_end: Duration::from_secs(5),
        stop_limit: None,
        advice: advice(&resolved.run),
    })
}

/// What to do after a rank died.
fn advice(run: &RunConfig) -> Option<String> {
    let save = run.checkpoint.save.as_ref()?;
    Some(match &run.checkpoint.load {
        Some(load) if load == save => {
            format!("The same command goes on from the last checkpoint in {}", save.display())
        }
        _ => format!("With --load {} the run goes on from the last checkpoint there", save.display()),
    })
}

/// Refuses, before anything is computed, folders that cannot be written to.
fn check_outputs(run: &RunConfig) -> Result<()> {
    let metrics = run.logging.metrics.as_deref().and_then(Path::parent).filter(|f| !f.as_os_str().is_empty());
    for folder in [run.checkpoint.save.as_deref(), metrics].into_iter().flatten() {
        std::fs::create_dir_all(folder)
            .and_then(|()| tempfile::tempfile_in(folder).map(drop))
            .map_err(|source| Error::Io { action: format!("write to the folder {}", folder.display()), source })?;
    }
    Ok(())
}

/// Opens the data, which tell the size of the vocabulary.
///
/// A run that resumes keeps the vocabulary it was trained with, even if the text that it was made from has changed.
fn open_data(resolved: &mut Resolved) -> Result<Datasets> {
    let run = &mut resolved.run;
    if let Some(load) = &run.checkpoint.load
        && run.data.tokenizer.as_deref().is_some_and(|spec| spec.starts_with("train:"))
        && load.join(TOKENIZER_FILE).is_file()
        && checkpoint::latest(load)?.is_some()
    {
        run.data.tokenizer = Some(load.join(TOKENIZER_FILE).to_string_lossy().into_owned());
    }
    let datasets = data::open(&run.data, run.model.seq_length, run.training.seed, resolved.vocab_size)?;
    run.model.vocab_size = datasets.vocab_size;
    Ok(datasets)
}

fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// This process's part of the run.
fn rank(mut resolved: Resolved, place: &RankInfo) -> Result<u8> {
    share_cores(place)?;
    let datasets = open_data(&mut resolved)?;
    train::preflight(&resolved.run)?;
    let world = connect(place, &resolved.distributed)?;
    // Until here there is nothing to save, and a signal just ends the process.
    let stop = StopSignal::listen()?;
    let mut reporter = report::for_rank(place.rank, resolved.run.logging.log_interval);
    if place.world_size == 1 {
        datasets.description.iter().for_each(|line| reporter.message(line));
    }
    if let (0, Some(save), Some(tokenizer)) = (place.rank, &resolved.run.checkpoint.save, &datasets.tokenizer) {
        tokenizer.save_into(save)?;
    }
    let outcome = run_rank(&resolved.run, world.clone(), datasets, reporter.as_mut(), &stop.flag);
    if let Err(error) = &outcome {
        // The others hear of it at once rather than when they miss this rank.
        world.abort(&error.to_string());
    }
    Ok(match outcome? {
        Outcome::Finished | Outcome::ExitInterval => 0,
        Outcome::Interrupted => stop.exit_code(),
    })
}

/// Gives this rank its share of the machine's cores, unless RAYON_NUM_THREADS says otherwise.
fn share_cores(place: &RankInfo) -> Result<()> {
    if environment("RAYON_NUM_THREADS").is_some() {
        return Ok(());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / place.local_world_size).max(1);
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|e| Error::Launch(format!("cannot start {threads} compute threads: {e}")))
}

/// Meets the other ranks.
fn connect(place: &RankInfo, distributed: &Distributed) -> Result<Group> {
    if place.world_size == 1 {
        return Ok(comm::solo());
    }
    let rendezvous = match (&distributed.rendezvous, Rendezvous::from_env(place.rank, environment)) {
        (Some(url), _) => Rendezvous::from_url(place.rank, url)?,
        (None, Ok(Rendezvous::Tcp { host, port, .. })) if environment(STORE_SERVED).is_some() => {
            Rendezvous::Tcp { host, port, is_host: false }
        }
        (None, from_environment) => from_environment?,
    };
    let options = CommOptions { timeout: distributed.timeout, ..CommOptions::default() };
    Ok(comm::init(place, &rendezvous, distributed.backend, options)?)
}

/// Trains, and continues the prompt once all steps are made.
fn run_rank(
    run: &RunConfig,
    world: Group,
    datasets: Datasets,
    reporter: &mut dyn Reporter,
    stop: &AtomicBool,
) -> megatron::Result<Outcome> {
    let (dtype, device) = (DType::F32, Device::Cpu);
    let p = &run.parallel;
    let (tp, sp) = (p.tensor_model_parallel_size, p.sequence_parallel);
    let model = Gpt::new(&run.model, tp, sp, run.training.recompute, dtype, &device)?;
    let Datasets { train, valid, test, tokenizer, fingerprint, .. } = datasets;
    let sources = Sources { train, valid, test, fingerprint };
    let mut trainer = Trainer::new(run, &model, world, &sources, dtype, &device)?;
    reporter.message(&describe(run));
    let outcome = trainer.run(reporter, stop)?;
    if let (Outcome::Finished, Some(prompt), Some(tokenizer)) = (outcome, &run.logging.prompt, &tokenizer) {
        let text = continue_prompt(&trainer, run, tokenizer, prompt)?;
        reporter.message(&format!("\n{prompt}{text}"));
    }
    Ok(outcome)
}

/// One line on what is trained and how it is cut.
fn describe(run: &RunConfig) -> String {
    let (m, p, t) = (&run.model, &run.parallel, &run.training);
    format!(
        "model: {:.1} M parameters in {} layers, vocabulary {} | tp {} · pp {} · dp {}{} | {} microbatches of {} · {} tokens",
        m.num_params() as f64 / 1e6,
        m.num_layers,
        m.vocab_size,
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.data_parallel_size,
        if p.sequence_parallel && p.tensor_model_parallel_size > 1 { " · sequence parallel" } else { "" },
        t.global_batch_size / (t.micro_batch_size * p.data_parallel_size),
        t.micro_batch_size,
        m.seq_length,
    )
}

/// Drawn at a temperature at which a small model neither repeats itself nor babbles.
const TEMPERATURE: f64 = 0.7;
const TOP_K: usize = 40;

fn continue_prompt(
    trainer: &Trainer,
    run: &RunConfig,
    tokenizer: &Tokenizer,
    prompt: &str,
) -> megatron::Result<String> {
    let tokens = tokenizer.encode(prompt)?;
    let sampling = Sampling { temperature: TEMPERATURE, top_k: TOP_K, seed: run.training.seed };
    let (count, window) = (run.logging.prompt_tokens, run.model.seq_length);
    let new = trainer.stage().generate(&tokens, count, window, tokenizer.eod(), &sampling)?;
    tokenizer.decode(&new)
}
