//! Collects all errors in the names on a command line and in a run file into one message.

use std::collections::BTreeSet;

use crate::error::Error;

/// The errors, in the order found.
#[derive(Debug, Default)]
pub struct Problems {
    /// Each error with its flags: flags with the same error share a line.
    flags: Vec<(String, Vec<String>)>,
    /// Errors of a run file, each preceded by its place.
    keys: Vec<String>,
    /// Pages of docs/reference on flags of other programs that are among them.
    pages: BTreeSet<&'static str>,
}

impl Problems {
    pub fn add(&mut self, flag: &str, why: &str) {
        match self.flags.iter_mut().find(|(known, _)| known == why) {
            Some((_, flags)) => flags.push(flag.to_string()),
            None => self.flags.push((why.to_string(), vec![flag.to_string()])),
        }
    }

    /// Adds a flag of another program, which `page` of docs/reference explains.
    pub fn of_others(&mut self, flag: &str, why: &str, page: &'static str) {
        self.pages.insert(page);
        self.add(flag, why);
    }

    /// Adds an unknown flag, with the flag that may be meant.
    pub fn unknown(&mut self, flag: &str, nearest: Option<String>) {
        match nearest {
            Some(known) => self.add(flag, &format!("no such flag; did you mean {known}?")),
            None => self.add(flag, "no such flag; --help lists all flags"),
        }
    }

    /// Adds a key or section of a run file.
    pub fn key(&mut self, place: &str, message: &str) {
        self.keys.push(format!("{place}: {message}"));
    }

    /// A key of another program.
    pub fn key_of_others(&mut self, place: &str, message: &str, page: &'static str) {
        self.pages.insert(page);
        self.key(place, message);
    }

    pub fn is_empty(&self) -> bool {
        self.flags.is_empty() && self.keys.is_empty()
    }

    /// All errors as one, if there are any.
    ///
    /// # Errors
    /// If there are some.
    pub fn result(self) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let flags = self.flags.iter().map(|(why, flags)| format!("{}: {why}", flags.join(", ")));
        let mut lines: Vec<String> = flags.chain(self.keys).collect();
        if lines.len() > 1 {
            lines.iter_mut().for_each(|line| line.insert_str(0, "  "));
            lines.insert(0, "some settings cannot be used:".to_string());
        }
        if !self.pages.is_empty() {
            let pages: Vec<_> =
                self.pages.iter().map(|page| format!("docs/reference/{page}")).collect();
            let explain = if pages.len() == 1 { "explains" } else { "explain" };
            lines.push(format!(
                "{} {explain} how flags of other programs are handled",
                pages.join(" and ")
            ));
        }
        Err(Error::usage(lines.join("\n")))
    }
}
