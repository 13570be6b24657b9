//! The `megatron` program, as a library so that its parsers can be fuzzed.

mod cli;
mod commands;
mod error;
mod fault;
#[doc(hidden)]
pub mod fuzz;
mod inference;
mod launch;
mod pictures;
mod ranks;
mod report;
mod signals;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::OnceLock;

use cli::Stop;
use commands::Request;
use error::Error;

/// Runs the program: reads the command line, runs the command, and returns the exit code.
pub fn main() -> ExitCode {
    fault::install_panic_hook();
    launch::started();
    launch::adjust();
    launch::watch_supervisor();
    let code = catch_unwind(AssertUnwindSafe(|| {
        run()
            .and_then(|code| if code == 0 { printed().map(|()| 0) } else { Ok(code) })
            .unwrap_or_else(|error| {
                fault::report(&error);
                error.exit_code()
            })
    }));
    match code.unwrap_or(fault::PANICKED) {
        0 => ExitCode::SUCCESS,
        code => fault::leave(code),
    }
}

fn run() -> error::Result<u8> {
    kernels::Isa::requested().map_err(Error::usage)?;
    let words: Vec<_> = std::env::args_os().collect();
    match commands::parse(&words) {
        Ok(Request::Pretrain(settings)) => commands::pretrain::run(&settings),
        Ok(Request::Launch(launch)) => commands::launch::run(&launch),
        Ok(Request::Timeline(args, settings)) => commands::timeline::run(&args, &settings),
        Ok(Request::Preprocess(args)) => commands::preprocess::run(&args),
        Ok(Request::Tokenizer(args)) => commands::preprocess::run_tokenizer(&args),
        Ok(Request::Import(args)) => commands::convert::import(&args),
        Ok(Request::Export(args)) => commands::convert::export(&args),
        Ok(Request::ConvertConfig(args)) => commands::convert_config::run(&args).map(|()| 0),
        Ok(Request::Bench(bench, origins)) => commands::bench::run(&bench, origins),
        Ok(Request::Completions(args)) => Ok(commands::completions::completions(&args)),
        Ok(Request::Man(args)) => commands::completions::man(&args),
        Ok(Request::Doctor(args)) => commands::doctor::run(&args).map(|()| 0),
        Ok(Request::Reshard(args, origins)) => commands::reshard::run(&args, &origins),
        Ok(Request::Inspect(args)) => commands::inspect::run(&args),
        Ok(Request::Generate(args)) => commands::generate::run(&args),
        Ok(Request::Eval(args)) => commands::eval::run(&args),
        Err(Stop::Error(error)) => Err(error),
        // Under a supervisor, the usage errors of all ranks become one message.
        Err(Stop::Clap(error))
            if error.use_stderr() && std::env::var_os(fault::SUPERVISED).is_some() =>
        {
            Err(Error::usage(error.to_string().trim_start_matches("error: ").trim_end()))
        }
        // Help and versions go to standard output.
        Err(Stop::Clap(error)) => {
            error.print().and_then(|()| std::io::stdout().flush()).unwrap_or_else(unprinted);
            Ok(error.exit_code() as u8)
        }
    }
}

/// The error that kept output from being written.
static UNPRINTED: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line. If that fails, the program continues but ends with an error; a closed reader is
/// not an error.
fn print_line(text: &str) {
    writeln!(std::io::stdout(), "{text}").unwrap_or_else(unprinted);
}

/// Prints a part of a line at once, otherwise as [`print_line`].
fn print_part(text: &str) {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).unwrap_or_else(unprinted);
}

fn unprinted(error: std::io::Error) {
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        // The first one counts.
        let _ = UNPRINTED.set(error);
    }
}

/// An error if lines were lost.
fn printed() -> error::Result<()> {
    UNPRINTED.get().map_or(Ok(()), |error| {
        let source = std::io::Error::new(error.kind(), error.to_string());
        Err(Error::Io { action: "write to standard output".to_string(), source })
    })
}
