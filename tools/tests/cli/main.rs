//! The program, seen from outside.

mod launch;
mod settings;
mod support;
