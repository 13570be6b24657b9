//! The machines of a run: DeepSpeed's hostfile, filtered by `--include` or `--exclude`.
//!
//! Source: deepspeed/launcher/runner.py. A line is `HOST slots=N`; `#` begins a comment. A filter
//! is `HOST[:SLOT,…]@…`, and a host without slots means all of its slots. Selected hosts keep the
//! order of the file, slots that of the filter. An IPv6 address may be in brackets, which a filter
//! needs if slots follow. A filter may name a host with its user as in the file.

use std::ffi::OsString;
use std::net::Ipv6Addr;
use std::path::Path;

use crate::error::{Error, Result};

/// Largest hostfile, in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// A machine and its slots in use, one per rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The name for ssh, with the user if the file names one.
    pub destination: String,
    /// Without the user.
    pub name: String,
    /// Numbers of GPUs.
    pub slots: Vec<usize>,
    /// Number of slots in the file.
    pub all: usize,
}

impl Host {
    /// CUDA_VISIBLE_DEVICES and its value, if some slots are left out.
    pub fn visible_devices(&self) -> Option<(OsString, OsString)> {
        let numbers: Vec<String> = self.slots.iter().map(usize::to_string).collect();
        let is_all = self.slots.iter().copied().eq(0..self.all);
        (!is_all).then(|| ("CUDA_VISIBLE_DEVICES".into(), numbers.join(",").into()))
    }
}

/// The hosts in `path` that the filter selects.
///
/// # Errors
/// If the file cannot be read or parsed, a filter names a host or slot that is not in it, or hosts
/// have different numbers of slots.
pub fn read(path: &Path, include: Option<&str>, exclude: Option<&str>) -> Result<Vec<Host>> {
    let text = megatron::files::read_text(path, MAX_BYTES).map_err(|source| Error::Io {
        action: format!("read the hostfile {}", path.display()),
        source,
    })?;
    let hosts = parse(&text).map_err(|why| Error::usage(format!("{}{why}", path.display())))?;
    let hosts = match (include, exclude) {
        (Some(filter), _) => {
            select(&hosts, filter, true).map_err(|why| format!("--include {filter}: {why}"))
        }
        (None, Some(filter)) => {
            select(&hosts, filter, false).map_err(|why| format!("--exclude {filter}: {why}"))
        }
        (None, None) => Ok(hosts),
    };
    let hosts = hosts.map_err(|why| Error::usage(format!("{why} ({})", path.display())))?;
    refuse_uneven(&hosts).map_err(|why| Error::usage(format!("{why} ({})", path.display())))?;
    Ok(hosts)
}

/// Error messages continue after the file's name.
fn parse(text: &str) -> std::result::Result<Vec<Host>, String> {
    let mut hosts: Vec<Host> = vec![];
    // Windows editors start UTF-8 files with this mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let wrong = |why: String| format!(":{}: {why}", number + 1);
        let host = parse_line(line).map_err(wrong)?;
        if hosts.iter().any(|other| other.name == host.name) {
            return Err(wrong(format!(
                "{} is listed twice; give all of its slots in one line",
                host.name
            )));
        }
        hosts.push(host);
    }
    if hosts.is_empty() {
        Err(" lists no host; a line is `HOST slots=N`".to_string())
    } else {
        Ok(hosts)
    }
}

fn parse_line(line: &str) -> std::result::Result<Host, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let parsed = match words[..] {
        [host, slots] => slots
            .strip_prefix("slots=")
            .and_then(|slots| Some((host, slots.parse::<usize>().ok()?))),
        _ => None,
    };
    let Some((written, all)) = parsed else {
        return Err(format!("`{line}` is not of the form `HOST slots=N`"));
    };
    let (user, host) =
        written.rsplit_once('@').map_or((None, written), |(user, host)| (Some(user), host));
    let name = bare(host);
    // ssh would parse it as an option.
    if name.is_empty() || written.starts_with('-') {
        return Err(format!("`{written}` is not a host name"));
    }
    if name.contains([':', '[', ']']) && !is_ipv6(name) {
        return Err(format!(
            "`{written}` is neither a host name nor an IPv6 address; give a port with --ssh-port"
        ));
    }
    if !(1..=4096).contains(&all) {
        return Err(format!(
            "slots={all} must be 1 to 4096; to leave {name} out, put # at the start of its line"
        ));
    }
    let destination = user.map_or_else(|| name.to_string(), |user| format!("{user}@{name}"));
    Ok(Host { destination, name: name.to_string(), slots: (0..all).collect(), all })
}

/// An address without brackets, which ssh does not accept.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

/// Whether `name` is an IPv6 address, possibly with a zone (`fe80::1%eth0`).
fn is_ipv6(name: &str) -> bool {
    name.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

/// The parts of a filter, `HOST[:SLOT,…]@…`. An `@` can also follow a host's user: this is so if
/// the file has that host with that user, and no host with the user's name.
fn parts(hosts: &[Host], filter: &str) -> Vec<String> {
    let mut parts: Vec<String> = vec![];
    let mut user: Option<&str> = None;
    for part in filter.split('@') {
        let name = split_slots(hosts, part).0;
        match user.take() {
            Some(user)
                if hosts.iter().any(|host| {
                    host.name == name && host.destination == format!("{user}@{name}")
                }) => {}
            Some(other) => parts.push(other.to_string()),
            None => {}
        }
        let is_user = |user: &str| {
            let is_host = hosts.iter().any(|host| host.name == split_slots(hosts, user).0);
            !is_host && hosts.iter().any(|host| host.destination == format!("{user}@{}", host.name))
        };
        if is_user(part) {
            user = Some(part);
        } else {
            parts.push(part.to_string());
        }
    }
    parts.extend(user.map(str::to_string));
    parts
}

/// The host that a part of a filter names, and the list of its slots.
fn split_slots<'a>(hosts: &[Host], part: &'a str) -> (&'a str, Option<&'a str>) {
    // A plain address contains colons itself.
    if is_ipv6(bare(part)) || hosts.iter().any(|host| host.name == bare(part)) {
        return (bare(part), None);
    }
    let after_brackets = part.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    after_brackets
        .or_else(|| part.split_once(':'))
        .map_or((part, None), |(name, list)| (name, Some(list)))
}

/// The hosts that `filter` names, or all others.
fn select(hosts: &[Host], filter: &str, include: bool) -> std::result::Result<Vec<Host>, String> {
    let mut named: Vec<(String, Vec<usize>)> = vec![];
    for part in parts(hosts, filter) {
        let (name, list) = split_slots(hosts, &part);
        let known = || hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ");
        let Some(host) = hosts.iter().find(|host| host.name == name) else {
            return Err(format!("there is no host `{name}`; the hosts are {}", known()));
        };
        if named.iter().any(|(other, _)| *other == name) {
            return Err(format!("{name} is named twice; give its slots as {name}:0,1"));
        }
        let mut slots = vec![];
        for slot in list.map(|list| list.split(',')).into_iter().flatten() {
            let number = slot.trim().parse().ok().filter(|number| *number < host.all);
            let number = number.ok_or_else(|| {
                format!("{name} has no slot `{slot}`; its slots are 0 to {}", host.all - 1)
            })?;
            if slots.contains(&number) {
                return Err(format!("slot {number} of {name} is named twice"));
            }
            slots.push(number);
        }
        named.push((name.to_string(), if list.is_some() { slots } else { host.slots.clone() }));
    }
    let selected = hosts.iter().filter_map(|host| {
        let named = named.iter().find(|(name, _)| *name == host.name).map(|(_, slots)| slots);
        let slots: Vec<usize> = match (named, include) {
            (Some(slots), true) => slots.clone(),
            (None, true) => vec![],
            (named, false) => host
                .slots
                .iter()
                .copied()
                .filter(|slot| !named.is_some_and(|named| named.contains(slot)))
                .collect(),
        };
        (!slots.is_empty()).then(|| Host { slots, ..host.clone() })
    });
    let selected: Vec<Host> = selected.collect();
    if selected.is_empty() {
        Err("no host is left; select at least one".to_string())
    } else {
        Ok(selected)
    }
}

/// torchrun's variables, and GPUs by local rank, need the same number of ranks on each machine.
fn refuse_uneven(hosts: &[Host]) -> std::result::Result<(), String> {
    let most = hosts.iter().map(|host| host.slots.len()).min().unwrap_or(0);
    if hosts.iter().all(|host| host.slots.len() == most) {
        return Ok(());
    }
    let counts: Vec<String> =
        hosts.iter().map(|host| format!("{} {}", host.name, host.slots.len())).collect();
    let slots =
        |host: &Host| host.slots[..most].iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let name = |host: &Host| {
        if is_ipv6(&host.name) { format!("[{}]", host.name) } else { host.name.clone() }
    };
    let even: Vec<String> =
        hosts.iter().map(|host| format!("{}:{}", name(host), slots(host))).collect();
    Err(format!(
        "all hosts must have the same number of ranks, but slots are: {}; select equally many of \
         each, for example with --include {}",
        counts.join(", "),
        even.join("@")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# two machines\nh0 slots=4\n\n  me@h1   slots=4  # spare: slot 3\n";

    fn selected(
        filter: &str,
        include: bool,
    ) -> std::result::Result<Vec<(String, Vec<usize>)>, String> {
        let hosts = select(&parse(FILE).unwrap(), filter, include)?;
        Ok(hosts.into_iter().map(|host| (host.name, host.slots)).collect())
    }

    #[test]
    fn lines_name_hosts_and_slots() {
        let hosts = parse(FILE).unwrap();
        let told: Vec<_> = hosts
            .iter()
            .map(|h| (h.destination.as_str(), h.name.as_str(), h.slots.as_slice()))
            .collect();
        assert_eq!(told, [("h0", "h0", &[0, 1, 2, 3][..]), ("me@h1", "h1", &[0, 1, 2, 3])]);
        assert_eq!(hosts[0].visible_devices(), None);
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_a_name() {
        assert_eq!(parse(&format!("\u{feff}{FILE}")).unwrap(), parse(FILE).unwrap());
        assert_eq!(parse("\u{feff}h0 slots=1").unwrap()[0].name, "h0");
    }

    #[test]
    fn addresses_of_ipv6_may_have_brackets() {
        let hosts =
            parse("[fd00::1] slots=2\nme@[fd00::2] slots=2\nfe80::1%eth0 slots=2\n").unwrap();
        let destinations: Vec<_> = hosts.iter().map(|host| host.destination.as_str()).collect();
        assert_eq!(destinations, ["fd00::1", "me@fd00::2", "fe80::1%eth0"]);
        for (filter, expected) in [
            ("[fd00::1]:1", &[("fd00::1", &[1][..])][..]),
            ("[fd00::1]@fe80::1%eth0", &[("fd00::1", &[0, 1]), ("fe80::1%eth0", &[0, 1])]),
            ("fd00::1@me@[fd00::2]:0", &[("fd00::1", &[0, 1]), ("fd00::2", &[0])]),
        ] {
            let chosen = select(&hosts, filter, true).unwrap();
            let chosen: Vec<_> =
                chosen.iter().map(|host| (host.name.as_str(), host.slots.as_slice())).collect();
            assert_eq!(chosen, expected, "{filter}");
        }
        let uneven = refuse_uneven(&select(&hosts, "[fd00::1]:1", false).unwrap()).unwrap_err();
        assert!(uneven.contains("--include [fd00::1]:0@[fd00::2]:0@[fe80::1%eth0]:0"), "{uneven}");
    }

    #[test]
    fn lines_that_cannot_be_used_are_told_with_their_number() {
        for (text, expected) in [
            ("", " lists no host"),
            ("# h0 slots=1", " lists no host"),
            ("h0 slots=1\nh1 lots=2", ":2: `h1 lots=2` is not of the form"),
            ("h0", ":1: `h0` is not"),
            ("h0 slots=1 max_slots=2", ":1: `h0 slots=1 max_slots=2` is not"),
            ("h0 slots=0", ":1: slots=0 must be 1 to 4096; to leave h0 out"),
            ("h0 slots=1\na@h0 slots=2", ":2: h0 is listed twice"),
            ("-oProxyCommand=x slots=1", ":1: `-oProxyCommand=x` is not a host name"),
            ("a@ slots=1", ":1: `a@` is not a host name"),
            (
                "h0:2222 slots=1",
                ":1: `h0:2222` is neither a host name nor an IPv6 address; give a port with --ssh-port",
            ),
            ("[fd00::1]:2222 slots=1", ":1: `[fd00::1]:2222` is neither a host name nor an IPv6"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.starts_with(expected), "{text}: {why}");
        }
    }

    #[test]
    fn filters_take_hosts_and_slots_in_or_leave_them_out() {
        let host = |name: &str, slots: &[usize]| (name.to_string(), slots.to_vec());
        assert_eq!(
            selected("h1@h0:2,0", true).unwrap(),
            [host("h0", &[2, 0]), host("h1", &[0, 1, 2, 3])]
        );
        assert_eq!(selected("h1", true).unwrap(), [host("h1", &[0, 1, 2, 3])]);
        assert_eq!(
            selected("h1:3", false).unwrap(),
            [host("h0", &[0, 1, 2, 3]), host("h1", &[0, 1, 2])]
        );
        assert_eq!(selected("h0", false).unwrap(), [host("h1", &[0, 1, 2, 3])]);
        // With the user as in the file.
        assert_eq!(selected("me@h1:0,1", true).unwrap(), [host("h1", &[0, 1])]);
        assert_eq!(
            selected("h0:0@me@h1", true).unwrap(),
            [host("h0", &[0]), host("h1", &[0, 1, 2, 3])]
        );
        assert_eq!(selected("me@h1:0@h0", false).unwrap(), [host("h1", &[1, 2, 3])]);
        let hosts = select(&parse(FILE).unwrap(), "h0:2,0", true).unwrap();
        assert_eq!(hosts[0].visible_devices().unwrap().1, "2,0");
    }

    #[test]
    fn filters_that_name_what_is_not_there_are_refused() {
        for (filter, include, expected) in [
            ("h2", true, "there is no host `h2`; the hosts are h0, h1"),
            ("", true, "there is no host ``"),
            ("you@h1", true, "there is no host `you`; the hosts are h0, h1"),
            ("me@h0", true, "there is no host `me`; the hosts are h0, h1"),
            ("h0@me", true, "there is no host `me`; the hosts are h0, h1"),
            ("me@me@h1", true, "there is no host `me`; the hosts are h0, h1"),
            ("h0:4", true, "h0 has no slot `4`; its slots are 0 to 3"),
            ("h0:", false, "h0 has no slot ``"),
            ("h0:0@h0:1", true, "h0 is named twice"),
            ("h0:1,1", false, "slot 1 of h0 is named twice"),
            ("h0@h1", false, "no host is left; select at least one"),
        ] {
            let why = selected(filter, include).unwrap_err();
            assert!(why.starts_with(expected), "{filter}: {why}");
        }
    }

    #[test]
    fn uneven_hosts_are_refused_with_an_even_choice() {
        let hosts = select(&parse(FILE).unwrap(), "h1:1,2", false).unwrap();
        let why = refuse_uneven(&hosts).unwrap_err();
        assert!(why.contains("h0 4, h1 2") && why.contains("--include h0:0,1@h1:0,3"), "{why}");
        assert!(refuse_uneven(&parse(FILE).unwrap()).is_ok());
    }
}
