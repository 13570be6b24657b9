//! The program, seen from outside.

mod launch;
mod pretrain;
mod settings;
mod support;
