//! The `megatron` program.

mod cli;
mod error;
mod launch;

fn main() {
    let words: Vec<_> = std::env::args_os().collect();
    match cli::parse(&words) {
        Ok(cli::Request::Pretrain(g)) => {
            println!("{:#?}", cli::resolve(&g, launch::LauncherEnv::read().unwrap().as_ref()).unwrap())
        }
        Ok(r) => println!("{r:?}"),
        Err(cli::Stop::Clap(e)) => e.exit(),
        Err(cli::Stop::Error(e)) => println!("{e}"),
    }
}
