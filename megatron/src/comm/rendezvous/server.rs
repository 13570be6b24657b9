//! Serves a store over TCP. One process of a run serves it: rank 0 or its launcher.
//!
//! Each connection has its own thread and is untrusted until it has proved that it has the run's
//! secret: greetings have a time limit, and the lengths, keys and connections are limited. If the
//! run has no secret, every process that speaks the protocol counts as a rank.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::tcp_store::resolve;
use super::waiting::Notify;
use super::wire::{self, Request};
use super::{RankInfo, is_loopback, number};
use crate::comm::CommOptions;
use crate::comm::inbox::lock;
use crate::comm::pending_connections::{PeerState, PendingConnections, Timed};
use crate::comm::secret::{self, Mismatch, ONE_SECRET, Secret, mismatch};
use crate::{Error, Result};

/// Maximum bytes of all keys and values.
const CAPACITY: usize = 256 << 20;
/// Time limit for a client's greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a key in one request.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Time for clients to finish when the server is dropped.
const LINGER: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Entries {
    values: BTreeMap<String, Vec<u8>>,
    bytes: usize,
}

/// The clients of a store.
#[derive(Clone, Debug, Default)]
pub struct Clients {
    /// Number of ranks.
    pub ranks: usize,
    /// Whether all of them are known to be on this machine.
    pub one_host: bool,
    /// As [`RankInfo::in_pod`].
    pub in_pod: bool,
    /// The secret for their authentication.
    pub secret: Secret,
    /// Receives messages about clients that fail to authenticate.
    pub notify: Option<Notify>,
}

impl Clients {
    /// The ranks of the run that `info` belongs to.
    pub(super) fn of(info: &RankInfo, options: &CommOptions) -> Self {
        Self {
            ranks: info.world_size,
            one_host: info.one_host(),
            in_pod: info.in_pod,
            secret: options.secret.clone(),
            notify: options.on_wait,
        }
    }
}

struct Shared {
    clients: Clients,
    address: SocketAddr,
    entries: Mutex<Entries>,
    changed: Condvar,
    stop: AtomicBool,
    pending: PendingConnections,
    /// The mismatches that were already reported.
    told: Mutex<Vec<Mismatch>>,
}

/// A running store. Dropping it closes the port and every connection.
pub struct StoreServer {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Listens at the addresses where clients that were given `host` look for the store. Port 0
    /// selects a free port.
    ///
    /// # Errors
    /// If the port is in use, or `host` is an address at which this machine cannot listen.
    pub fn bind(host: &str, port: u16, clients: Clients) -> Result<Self> {
        let listener = listen(host, port, &clients)?;
        let lost = |e| Error::comm(format!("rendezvous: cannot serve {host}:{port}: {e}"));
        let shared = Arc::new(Shared {
            address: listener.local_addr().map_err(lost)?,
            entries: Mutex::default(),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            pending: PendingConnections::new(clients.ranks),
            told: Mutex::default(),
            clients,
        });
        let accepting = shared.clone();
        let acceptor = std::thread::Builder::new().name("store".into());
        let acceptor = acceptor.spawn(move || accepting.accept(listener)).map_err(lost)?;
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }
}

fn listen(host: &str, port: u16, clients: &Clients) -> Result<TcpListener> {
    let refuse = |e: io::Error| {
        Error::config(match e.kind() {
            io::ErrorKind::AddrInUse => format!(
                "rendezvous: port {port} of {host} is in use; stop the program that listens there, or set MASTER_PORT \
                 to a free port"
            ),
            _ => format!(
                "rendezvous: cannot listen on {host}:{port}: {e}; check MASTER_ADDR and MASTER_PORT"
            ),
        })
    };
    let addresses = reachable(host, port, clients).map_err(refuse)?;
    match TcpListener::bind(&addresses[..]) {
        // The address is translated on its way to this machine (NAT), so listen on all interfaces.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
            TcpListener::bind(&all(port)[..]).map_err(refuse)
        }
        result => result.map_err(refuse),
    }
}

/// All interfaces of this machine.
fn all(port: u16) -> [SocketAddr; 2] {
    [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
}

/// The addresses to listen at, so that processes that were given `host` reach the store, and as few
/// others as possible: the addresses that `host` has on this machine.
///
/// These addresses are not usable if other ranks are on other machines and a name resolves to a
/// loopback address (Debian gives a machine's own name `127.0.1.1`) or does not resolve yet (a
/// Kubernetes service is known only some time after its pod starts). In a pod, which has its own
/// interfaces, `localhost` is not usable either: Kubeflow's PyTorchJob gives it to rank 0 for its
/// own machine.
fn reachable(host: &str, port: u16, clients: &Clients) -> io::Result<Vec<SocketAddr>> {
    let is_literal = host.parse::<IpAddr>().is_ok();
    if is_loopback(host) || is_literal {
        let is_told_otherwise = is_loopback(host) && clients.in_pod && !clients.one_host;
        return if is_told_otherwise { Ok(all(port).to_vec()) } else { resolve(host, port) };
    }
    let found = resolve(host, port).unwrap_or_default();
    let leads_here = |address: &SocketAddr| clients.one_host || !address.ip().is_loopback();
    let tells = !clients.in_pod && !found.is_empty() && found.iter().all(leads_here);
    Ok(if tells { found } else { all(port).to_vec() })
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let deadline = Instant::now() + LINGER;
        while !self.shared.pending.is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        // If this fails, too, the thread stays until the process ends.
        if self.shared.stop() {
            let _ = self.acceptor.take().map(JoinHandle::join);
        }
    }
}

fn out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Tells a client that the server has no room for it.
fn turn_away(mut stream: TcpStream) {
    // A client that has left needs no answer.
    let _ = stream.set_nonblocking(true).and_then(|()| stream.write_all(wire::FULL));
    // Closing with the greeting unread would reset the connection and lose the answer.
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(Duration::from_millis(100))));
    let _ = io::copy(&mut stream.take(64), &mut io::sink());
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: TcpListener) {
        // A reserve file descriptor for the case that no other is left, so that a caller can be
        // told why it is not served.
        let mut spare = listener.try_clone().ok();
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) => {
                    let waiting = out_of_descriptors(&e) && spare.take().is_some();
                    if waiting && let Ok((stream, _)) = listener.accept() {
                        turn_away(stream);
                    } else {
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    spare = spare.or_else(|| listener.try_clone().ok());
                    continue;
                }
            };
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let Ok(number) = self.pending.enter(&stream) else {
                turn_away(stream);
                continue;
            };
            let shared = self.clone();
            let serving =
                std::thread::Builder::new().name("store-client".into()).spawn(move || {
                    // Ends with the connection. A misbehaving client is disconnected, which is its
                    // error report.
                    let is_last = shared.serve(stream, number).unwrap_or(false);
                    shared.pending.leave(number);
                    if is_last {
                        shared.stop();
                    }
                });
            if serving.is_err() {
                self.pending.leave(number);
            }
        }
    }

    /// Closes the port and every connection. Returns whether the port is closed or about to be.
    fn stop(&self) -> bool {
        let was_stopped = self.stop.swap(true, Ordering::AcqRel);
        self.pending.clear();
        let mut wake = self.address;
        if wake.ip().is_unspecified() {
            wake.set_ip(if wake.is_ipv4() {
                Ipv4Addr::LOCALHOST.into()
            } else {
                Ipv6Addr::LOCALHOST.into()
            });
        }
        // Wakes the accepting thread, which then sees `stop`.
        was_stopped || TcpStream::connect_timeout(&wake, LINGER).is_ok()
    }

    /// Serves a client until it leaves. Returns whether the client reported that the store is no
    /// longer needed.
    fn serve(&self, mut stream: TcpStream, number: u64) -> io::Result<bool> {
        stream.set_nodelay(true)?;
        let mut timed = Timed::new(&stream, GREETING_TIMEOUT);
        let secret = &self.clients.secret;
        let greeting = || wire::GREETING.to_vec();
        secret::answer(&mut timed, secret, |stream| {
            wire::read_greeting(stream).map(|()| (greeting(), greeting()))
        })
        .and_then(|answered| {
            self.pending.heard(number, PeerState::Introduced);
            answered.recognize(&mut timed, secret)
        })
        .inspect_err(|e| self.tell_of(&stream, e))?;
        self.pending.heard(number, PeerState::Known);
        stream.write_all(&[wire::WELCOME])?;
        stream.set_read_timeout(None)?;
        loop {
            let request = wire::read_request(&mut stream)?;
            self.pending.heard(number, PeerState::Known);
            let is_last = request.operation == wire::CLOSE;
            let (status, value) = self.answer(request);
            wire::write_reply(&mut stream, status, &value)?;
            if is_last {
                return Ok(true);
            }
        }
    }

    /// Reports a client without the run's secret, once per kind of mismatch.
    fn tell_of(&self, stream: &TcpStream, error: &io::Error) {
        let (Some(notify), Some(mismatch)) = (self.clients.notify, mismatch(error)) else { return };
        let mut told = lock(&self.told);
        if !told.contains(&mismatch) {
            told.push(mismatch);
            let who = stream
                .peer_addr()
                .map_or_else(|_| "somewhere".into(), |address| address.ip().to_string());
            notify(&format!(
                "a process at {who} that tried to join was refused: {mismatch}; if it is a rank, {ONE_SECRET}"
            ));
        }
    }

    fn answer(&self, request: Request) -> (u8, Vec<u8>) {
        let Request { operation, key, value } = request;
        let refuse = |why: &str| (wire::REFUSED, why.as_bytes().to_vec());
        let found = |value: Option<&Vec<u8>>| {
            value.map_or((wire::NONE, vec![]), |value| (wire::OK, value.clone()))
        };
        let mut entries = lock(&self.entries);
        match operation {
            wire::SET => match entries.set(key, value) {
                Ok(()) => self.changed.notify_all(),
                Err(why) => return refuse(why),
            },
            wire::GET => return found(entries.values.get(&key)),
            wire::ADD => {
                let Ok(amount) = value.try_into().map(i64::from_le_bytes) else {
                    return refuse("not a number");
                };
                let sum = match number(&key, entries.values.get(&key).map(Vec::as_slice)) {
                    Ok(sum) => sum.wrapping_add(amount).to_string().into_bytes(),
                    Err(e) => return refuse(&e.to_string()),
                };
                if let Err(why) = entries.set(key, sum.clone()) {
                    return refuse(why);
                }
                self.changed.notify_all();
                return (wire::OK, sum);
            }
            wire::LIST => {
                let keys = entries.values.range(key.clone()..).map(|(key, _)| key.as_str());
                let keys: Vec<&str> =
                    keys.take_while(|candidate| candidate.starts_with(&key)).collect();
                return (wire::OK, keys.join("\0").into_bytes());
            }
            wire::WAIT => {
                let Ok(wait) = value.try_into().map(u32::from_le_bytes) else {
                    return refuse("not a duration");
                };
                let deadline = Instant::now() + Duration::from_millis(wait.into()).min(MAX_WAIT);
                loop {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || entries.values.contains_key(&key) {
                        return found(entries.values.get(&key));
                    }
                    entries = self
                        .changed
                        .wait_timeout(entries, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            }
            wire::CLOSE => {}
            _ => return refuse("unknown operation"),
        }
        (wire::OK, vec![])
    }
}

impl Entries {
    fn set(&mut self, key: String, value: Vec<u8>) -> std::result::Result<(), &'static str> {
        let freed = self.values.get(&key).map_or(0, |old| key.len() + old.len());
        let bytes = self.bytes - freed + key.len() + value.len();
        if bytes > CAPACITY {
            return Err("the store is full");
        }
        self.bytes = bytes;
        self.values.insert(key, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients(one_host: bool, in_pod: bool) -> Clients {
        Clients { ranks: 2, one_host, in_pod, ..Clients::default() }
    }

    fn at(ip: &str) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), 7)
    }

    #[test]
    fn a_name_whose_addresses_here_say_nothing_is_served_on_all_interfaces() {
        assert_eq!(reachable("job-master-0.invalid", 7, &clients(false, false)).unwrap(), all(7));
        let here = super::super::this_host();
        assert_eq!(reachable(&here, 7, &clients(false, true)).unwrap(), all(7), "in a pod");
        let found = resolve(&here, 7).unwrap_or_default();
        let lead_here =
            !found.is_empty() && found.iter().all(|address| !address.ip().is_loopback());
        let expected = if lead_here { found } else { all(7).to_vec() };
        assert_eq!(reachable(&here, 7, &clients(false, false)).unwrap(), expected);
    }

    #[test]
    fn an_address_is_served_alone() {
        for in_pod in [false, true] {
            assert_eq!(
                reachable("192.0.2.1", 7, &clients(false, in_pod)).unwrap(),
                [at("192.0.2.1")]
            );
        }
    }

    #[test]
    fn a_loopback_address_is_served_alone_but_in_a_pod_whose_operator_may_have_told_others_another()
    {
        for (host, ip) in [("localhost", "127.0.0.1"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1")] {
            for (one_host, in_pod) in [(true, false), (false, false), (true, true)] {
                let private = reachable(host, 7, &clients(one_host, in_pod)).unwrap();
                assert!(
                    private.contains(&at(ip))
                        && private.iter().all(|address| address.ip().is_loopback()),
                    "{host}: {private:?}"
                );
            }
            assert_eq!(reachable(host, 7, &clients(false, true)).unwrap(), all(7), "{host}");
        }
    }

    #[test]
    fn a_client_that_there_is_no_room_for_is_told_so() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = std::thread::spawn(move || turn_away(listener.accept().unwrap().0));
        let refused = super::super::TcpStore::connect(
            "127.0.0.1",
            port,
            Duration::from_secs(5),
            &Secret::default(),
            None,
        );
        let refused = refused.err().unwrap();
        serving.join().unwrap();
        let message = refused.to_string();
        assert!(message.contains("ulimit -n") && !message.contains("MASTER_PORT"), "{message}");
    }
}
