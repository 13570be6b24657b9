//! Rendezvous: the ranks of a run find each other and become a world.
//!
//! Ranks meet at a small key-value store, over TCP or in a shared folder. They agree on the members
//! (`join`), and connect through the suitable backend.
//!
//! ```
//! use megatron::comm::{Backend, CommOptions, Communicator, RankInfo, Rendezvous, init};
//!
//! # fn main() -> megatron::Result<()> {
//! // The variables that torchrun would set; `World::from_env` reads the environment itself.
//! let launcher = |rank: usize| {
//!     move |name: &str| match name {
//!         "RANK" | "LOCAL_RANK" => Some(rank.to_string()),
//!         "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some("2".to_string()),
//!         "MASTER_ADDR" => Some("127.0.0.1".to_string()),
//!         _ => None,
//!     }
//! };
//! # let folder = tempfile::tempdir().unwrap();
//! let rendezvous = Rendezvous::File { dir: folder.path().join("meeting") };
//! let rank = |rank| -> megatron::Result<Vec<Vec<u8>>> {
//!     let info = RankInfo::from_env(launcher(rank))?.unwrap();
//!     let world = init(&info, &rendezvous, Backend::Tcp, CommOptions::default())?;
//!     world.group.all_gather_bytes(format!("rank {rank}").as_bytes())
//! };
//! // Ranks are usually processes.
//! let (first, second) = std::thread::scope(|scope| {
//!     let second = scope.spawn(|| rank(1));
//!     (rank(0), second.join().unwrap())
//! });
//! assert_eq!(first?, [b"rank 0", b"rank 1"]);
//! assert_eq!(second?, [b"rank 0", b"rank 1"]);
//! # Ok(())
//! # }
//! ```

mod env;
mod file_store;
pub(crate) mod host;
mod join;
mod sealed;
mod server;
mod spawn;
mod store;
mod tcp_store;
mod waiting;
pub(super) mod wire;

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use self::env::{Variables, ignored_world};
pub use self::file_store::FileStore;
pub use self::host::name as this_host;
pub(crate) use self::join::Member;
use self::sealed::Sealed;
pub use self::server::{Clients, StoreServer};
pub use self::spawn::{spawn, spawn_with};
pub use self::store::Store;
pub use self::tcp_store::TcpStore;
pub(crate) use self::tcp_store::connect_once;
use super::CommOptions;
use super::communicator::Group;
use super::endpoint::{Endpoint, Link};
use super::group::EndpointGroup;
use super::inbox::{Inbox, Loss};
use super::local::{LocalLink, Segment};
use super::tcp::{Listener, TcpLink};
use crate::text::printable;
use crate::{Error, Result};

/// A rank's place in the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// This process's number, from 0, below `world_size`.
    pub rank: usize,
    /// Number of ranks on all hosts.
    pub world_size: usize,
    /// Index among the ranks of this host, if the launcher gave it; otherwise [`init`] determines
    /// it.
    pub local_rank: Option<usize>,
    /// Number of ranks on this host, if the launcher gave it; otherwise [`init`] determines it.
    pub local_world_size: Option<usize>,
    /// Name of this host at which others can reach it; see [`this_host`].
    pub host: String,
    /// Names of the variables that its numbers came from.
    pub variables: Variables,
    /// Whether this is a Kubernetes pod. There an operator may have given rank 0 the MASTER_ADDR
    /// `localhost`, and the other ranks a name.
    pub in_pod: bool,
}

impl RankInfo {
    /// Checks that the numbers are consistent.
    ///
    /// # Errors
    /// If they are not; the message names each.
    pub fn validate(&self) -> Result<()> {
        let Self { rank, world_size, local_rank, local_world_size, variables: names, .. } = self;
        let world = format!("{}={world_size}", names.world_size);
        if rank >= world_size {
            return Err(Error::config(format!("{}={rank} must be below {world}", names.rank)));
        }
        let local_world = local_world_size.map(|size| format!("{}={size}", names.local_world_size));
        if let (Some(size), Some(local_world)) = (local_world_size, &local_world)
            && size > world_size
        {
            return Err(Error::config(format!("{local_world} must not exceed {world}")));
        }
        let most = local_world_size.unwrap_or(*world_size);
        if let Some(local) = local_rank.filter(|local| *local >= most) {
            let most = local_world.unwrap_or(world);
            return Err(Error::config(format!(
                "{}={local} must be below {most}",
                names.local_rank
            )));
        }
        Ok(())
    }

    /// Whether all ranks are known to be on this host, so that no other host must reach them.
    pub fn one_host(&self) -> bool {
        self.local_world_size == Some(self.world_size)
    }

    /// This rank's index among the ranks of this host, and their number: as given by the launcher,
    /// otherwise determined from the `members` near this one.
    fn local(&self, members: &[Member]) -> (usize, usize) {
        let near =
            |of: &[Member]| of.iter().filter(|member| member.is_near(&members[self.rank])).count();
        let index = self.local_rank.unwrap_or_else(|| near(&members[..self.rank]));
        let size = self.local_world_size.unwrap_or_else(|| near(members));
        (index, size.max(index + 1))
    }
}

/// All ranks, connected.
pub struct World {
    /// The group of all ranks, with this process as its member.
    pub group: Group,
    /// This rank's index among the ranks of its host.
    pub local_rank: usize,
    /// Number of ranks on this host.
    pub local_world_size: usize,
}

/// The place where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// A store over TCP, which this process serves if `is_host` (exactly one does).
    Tcp {
        /// Name or address of the host that serves the store.
        host: String,
        /// Port of the store.
        port: u16,
        /// Whether this process serves it.
        is_host: bool,
    },
    /// A folder that all ranks share. It may hold files of earlier runs, but not of another run
    /// that is starting.
    File {
        /// The folder. It is created if it does not exist.
        dir: PathBuf,
    },
}

/// Time limit for ranks that have met to connect to each other. All are present and wait for
/// nothing else.
const CONNECTING: Duration = Duration::from_secs(60);

/// The transport between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Shared memory if all ranks are on one host, TCP otherwise.
    #[default]
    Auto,
    /// Shared memory.
    Local,
    /// TCP connections between every pair of ranks.
    Tcp,
    /// As `Auto` for tensors on the CPU, and NCCL for tensors on GPUs (`comm::nccl::world`).
    Nccl,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Tcp => "tcp",
            Self::Nccl => "nccl",
        })
    }
}

/// The number in a store's value; 0 without a value.
fn number(key: &str, value: Option<&[u8]>) -> Result<i64> {
    let Some(value) = value else { return Ok(0) };
    let text = printable(value);
    text.parse().map_err(|_| {
        Error::comm(format!("rendezvous key {} holds {text:.40}, not a number", printable(key)))
    })
}

/// Whether `host` means the local machine on every machine. Only literals count, because a
/// machine's name may resolve to a loopback address.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The store, this process's server for it if any, and a listener with the addresses at which
/// others may reach it.
struct Meeting {
    store: Sealed,
    _server: Option<StoreServer>,
    listener: Option<Listener>,
    addresses: Vec<String>,
    /// The address at which the store was found, unless it is a loopback address.
    found_at: Option<IpAddr>,
}

fn meet(
    info: &RankInfo,
    rendezvous: &Rendezvous,
    backend: Backend,
    options: &CommOptions,
) -> Result<Meeting> {
    let mut hosts = vec![info.host.clone()];
    // Whether only this machine must reach this rank.
    let mut loopback = info.one_host();
    let mut found_at = None;
    let (store, server): (Box<dyn Store>, _) = match rendezvous {
        Rendezvous::Tcp { host, port, is_host } => {
            let serve = || StoreServer::bind(host, *port, Clients::of(info, options));
            let server = if *is_host { Some(serve()?) } else { None };
            let store = TcpStore::connect(
                host,
                *port,
                options.connect_timeout,
                &options.secret,
                options.on_wait,
            )?;
            loopback |= is_loopback(host) && !info.in_pod;
            found_at = store.peer_ip().filter(|ip| !loopback && !ip.is_loopback());
            if *is_host && info.rank == 0 {
                hosts.insert(0, host.clone());
            }
            if let Some(ip) = store.local_ip() {
                hosts.insert(0, ip.to_string());
            }
            (Box::new(store), server)
        }
        Rendezvous::File { dir } => (Box::new(FileStore::open(dir)?), None),
    };
    let store = Sealed::new(store, options.secret.clone());
    if loopback {
        hosts.clear();
    } else {
        // All of the above may be loopback addresses.
        let own = host::addresses().into_iter().map(|ip| ip.to_string());
        hosts.extend(own.filter(|ip| !hosts.contains(ip)).collect::<Vec<_>>());
    }
    hosts.extend(["127.0.0.1", "::1"].map(String::from));
    let listener = if backend == Backend::Local { None } else { Some(Listener::bind(loopback)?) };
    let addresses = match &listener {
        Some(listener) => hosts.iter().map(|host| listener.at(host)).collect(),
        None => vec![],
    };
    Ok(Meeting { store, _server: server, listener, addresses, found_at })
}

/// Adds `found_at`, the address at which this rank found rank 0's store, before the other addresses
/// of the ranks on that machine. Those ranks may know only `localhost` and no name of their machine
/// that can be reached from here.
fn add_address(members: &mut [Member], found_at: IpAddr) {
    let Some(first) = members.first().cloned() else { return };
    for member in members.iter_mut().filter(|member| member.is_near(&first)) {
        let port = member.addresses.first().and_then(|address| Some(address.split_once(' ')?.1));
        if let Some(address) = port.map(|port| format!("{found_at} {port}")) {
            member.addresses.retain(|known| *known != address);
            member.addresses.insert(0, address);
        }
    }
}

/// Makes this process a rank of a run: meets the others, connects, and returns the world when all
/// are connected.
///
/// # Errors
/// If settings of ranks contradict each other, if ranks do not appear within
/// `options.connect_timeout` (they are named) or cannot connect within a minute after that, or if
/// the rendezvous port is in use.
pub fn init(
    info: &RankInfo,
    rendezvous: &Rendezvous,
    backend: Backend,
    options: CommOptions,
) -> Result<World> {
    info.validate()?;
    if info.world_size == 1 {
        return Ok(World { group: super::threads::solo(), local_rank: 0, local_world_size: 1 });
    }
    let deadline = Instant::now() + options.connect_timeout;
    // `_server` comes first, so it is dropped last: it waits briefly for its clients to leave.
    let Meeting { _server, store, listener, addresses, found_at } =
        meet(info, rendezvous, backend, &options)?;
    let me = Member {
        token: join::fresh(),
        world_size: info.world_size,
        backend,
        host: info.host.clone(),
        identity: host::identity(),
        pid: std::process::id(),
        addresses,
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let (nonce, mut members) = join::join(&store, info, me, left, options.on_wait)?;
    let deadline = Instant::now() + options.connect_timeout.min(CONNECTING);
    found_at.into_iter().for_each(|ip| add_address(&mut members, ip));
    let own = &members[info.rank];
    let elsewhere =
        members.iter().enumerate().find(|(_, m)| m.host != own.host || m.identity != own.identity);
    let inbox = Arc::new(Inbox::new(info.world_size));
    let link: Box<dyn Link> = match (backend, elsewhere, listener) {
        (Backend::Local, Some((rank, member)), _) => {
            let host = match member.host == info.host {
                true => {
                    format!("{} too, but in another container or from another boot", member.host)
                }
                false => member.host.clone(),
            };
            return Err(Error::config(format!(
                "the local backend needs all ranks on one host, but rank {} is on {} and rank \
                 {rank} on {host}; use --distributed-backend tcp",
                info.rank, info.host
            )));
        }
        (Backend::Tcp, _, Some(listener))
        | (Backend::Auto | Backend::Nccl, Some(_), Some(listener)) => Box::new(TcpLink::connect(
            info.rank,
            &members,
            nonce,
            listener,
            inbox.clone(),
            deadline,
            &options,
        )?),
        _ => Box::new(LocalLink::new(
            Arc::new(share(&store, info, nonce, deadline)?),
            options.timeout,
        )),
    };
    let endpoint = Endpoint::new(info.rank, options, inbox, link);
    let group = EndpointGroup::world(Arc::new(endpoint), info.world_size);
    // No rank needs the store after all have reached this point.
    group.barrier()?;
    if info.rank == 0 {
        // Its server may have closed it already.
        let _ = store.close();
    }
    let (local_rank, local_world_size) = info.local(&members);
    Ok(World { group, local_rank, local_world_size })
}

/// The shared memory of this host's ranks, joined by all of them.
fn share(store: &dyn Store, info: &RankInfo, nonce: u64, deadline: Instant) -> Result<Segment> {
    let (start, left) = (Instant::now(), || deadline.saturating_duration_since(Instant::now()));
    let late = |missing| Error::Timeout {
        operation: "joining shared memory".into(),
        missing,
        seconds: start.elapsed().as_secs_f64(),
    };
    let key = format!("{nonce:x}/segment");
    if info.rank == 0 {
        let mut segment = Segment::create(info.world_size, nonce)?;
        let place = format!("{} {}", std::process::id(), segment.fd().unwrap_or(-1));
        store.set(&key, place.as_bytes())?;
        let all = store::poll(left(), || Ok(segment.absent().is_empty().then_some(())))?;
        segment.close();
        let missing = segment.absent();
        if let (None, Some(&rank)) = (all, missing.first()) {
            // The others must blame that rank, too, and not this one, which ends because of it.
            let how = format!(
                "did not join the shared memory within {:.0} s",
                start.elapsed().as_secs_f64()
            );
            segment.condemn(&Loss { rank, how });
            return Err(late(missing));
        }
        return Ok(segment);
    }
    let place = store.wait(&key, left())?.ok_or_else(|| late(vec![0]))?;
    let place = printable(&place);
    let parsed =
        place.split_once(' ').and_then(|(pid, fd)| Some((pid.parse().ok()?, fd.parse().ok()?)));
    let (pid, fd) =
        parsed.ok_or_else(|| Error::comm(format!("rendezvous key {key} holds {place:.40}")))?;
    Segment::join(pid, fd, info.rank, info.world_size, nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(host: &str, addresses: &[&str]) -> Member {
        let addresses = addresses.iter().map(|address| address.to_string()).collect();
        Member {
            token: 0,
            world_size: 3,
            backend: Backend::Auto,
            host: host.into(),
            identity: host.into(),
            pid: 1,
            addresses,
        }
    }

    #[test]
    fn ranks_on_rank_0s_machine_are_looked_for_where_its_store_was_found() {
        let mut members = [
            member("a", &["127.0.0.1 7"]),
            member("b", &["192.0.2.2 8"]),
            member("a", &["a 9", "192.0.2.1 9"]),
        ];
        add_address(&mut members, "192.0.2.1".parse().unwrap());
        let addresses = members.map(|member| member.addresses);
        assert_eq!(
            addresses,
            [vec!["192.0.2.1 7", "127.0.0.1 7"], vec!["192.0.2.2 8"], vec!["192.0.2.1 9", "a 9"]]
        );
    }

    #[test]
    fn ranks_whose_launcher_says_nothing_of_hosts_count_those_near_them() {
        let members = ["a", "b", "a", "c", "a"].map(|host| member(host, &[]));
        let told = [(None, None), (Some(1), Some(2)), (Some(3), None), (None, Some(4))];
        let found = |rank| {
            told.map(|(local_rank, local_world_size)| {
                let here = RankInfo { host: "a".into(), ..RankInfo::alone() };
                RankInfo { rank, world_size: 5, local_rank, local_world_size, ..here }
                    .local(&members)
            })
        };
        assert_eq!(found(2), [(1, 3), (1, 2), (3, 4), (1, 4)]);
        assert_eq!(found(3), [(0, 1), (1, 2), (3, 4), (0, 4)]);
    }

    #[test]
    fn a_rank_that_knows_its_machine_as_localhost_tells_others_its_addresses_in_a_pod_alone() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let rendezvous = Rendezvous::Tcp { host: "localhost".into(), port, is_host: true };
        let own: Vec<String> = host::addresses().iter().map(IpAddr::to_string).collect();
        for (one_host, in_pod) in [(false, true), (true, true), (true, false), (false, false)] {
            let local_world_size = one_host.then_some(2);
            let info = RankInfo { world_size: 2, local_world_size, in_pod, ..RankInfo::alone() };
            let meeting = meet(&info, &rendezvous, Backend::Auto, &CommOptions::default()).unwrap();
            let told = |ip: &String| {
                meeting.addresses.iter().any(|address| address.starts_with(&format!("{ip} ")))
            };
            let is_private = one_host || !in_pod;
            assert!(
                own.iter().all(|ip| told(ip) != is_private),
                "{own:?}, {:?}",
                meeting.addresses
            );
            let addresses = [
                meeting._server.as_ref().unwrap().address(),
                meeting.listener.as_ref().unwrap().address(),
            ];
            assert_eq!(
                addresses.map(|address| address.ip().is_loopback()),
                [is_private; 2],
                "{addresses:?}"
            );
        }
    }

    #[test]
    fn a_rank_that_does_not_join_the_shared_memory_is_named_to_all() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let deadline = Instant::now() + Duration::from_millis(500);
        let share = |rank| {
            share(&store, &RankInfo { rank, world_size: 3, ..RankInfo::alone() }, 7, deadline)
        };
        let (first, joined) = std::thread::scope(|scope| {
            let first = scope.spawn(|| share(0));
            let joined = share(1).unwrap();
            (first.join().unwrap(), joined)
        });
        let Err(Error::Timeout { missing, .. }) = first else { panic!() };
        assert_eq!(missing, [2]);
        let loss = joined.verdict().unwrap();
        assert_eq!((loss.rank, loss.how.starts_with("did not join")), (2, true), "{loss:?}");
    }
}
