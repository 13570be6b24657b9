//! Serves a store over TCP; one process of a run, rank 0 or its launcher, does.
//!
//! Whatever connects is served by a thread of its own and untrusted: greetings are timed, lengths, keys and connections bounded.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::tcp_store::resolve;
use super::wire::{self, Request};
use super::{is_loopback, number};
use crate::comm::inbox::lock;
use crate::{Error, Result};

/// Bytes that all keys and values may take.
const CAPACITY: usize = 256 << 20;
const MAX_CONNECTIONS: usize = 16 << 10;
/// Longest wait for a key in one request.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// How long clients get to finish when the server is dropped.
const LINGER: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Entries {
    values: BTreeMap<String, Vec<u8>>,
    bytes: usize,
}

#[derive(Default)]
struct Shared {
    entries: Mutex<Entries>,
    changed: Condvar,
    stop: AtomicBool,
    connections: Mutex<BTreeMap<u64, TcpStream>>,
}

/// A running store. Dropping it closes the port and every connection.
pub struct StoreServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Listens where those find it who were told `host`, and who are all on this machine if `one_host`; port 0 takes a free one.
    ///
    /// # Errors
    /// If the port is taken, or `host` is an address that this machine cannot listen at.
    pub fn bind(host: &str, port: u16, one_host: bool) -> Result<Self> {
        let listener = listen(host, port, one_host)?;
        let lost = |e| Error::comm(format!("rendezvous: cannot serve {host}:{port}: {e}"));
        let address = listener.local_addr().map_err(lost)?;
        let shared = Arc::new(Shared::default());
        let accepting = shared.clone();
        let acceptor = std::thread::Builder::new().name("store".into());
        let acceptor = acceptor.spawn(move || accepting.accept(&listener)).map_err(lost)?;
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn listen(host: &str, port: u16, one_host: bool) -> Result<TcpListener> {
    let refuse = |e: io::Error| {
        Error::config(match e.kind() {
            io::ErrorKind::AddrInUse => format!(
                "rendezvous: port {port} of {host} is in use; stop the program that listens there, or set MASTER_PORT \
                 to a free port"
            ),
            _ => format!("rendezvous: cannot listen on {host}:{port}: {e}; check MASTER_ADDR and MASTER_PORT"),
        })
    };
    let addresses = reachable(host, port, one_host).map_err(refuse)?;
    match TcpListener::bind(&addresses[..]) {
        // The address leads to this machine through a translated address: listen on all of its own.
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => TcpListener::bind(&all(port)[..]).map_err(refuse),
        result => result.map_err(refuse),
    }
}

/// Every interface of this machine.
fn all(port: u16) -> [SocketAddr; 2] {
    [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
}

/// Where to listen so that whoever was told `host`, or what this machine is called elsewhere, gets here.
///
/// A name is no word on where others find it: many systems give a machine's own name a loopback address (`127.0.1.1`, Debian), it may have
/// one on each of several networks, or none yet (a Kubernetes service is known some time after its pod starts), and Kubeflow's PyTorchJob
/// calls rank 0's machine `localhost` to itself.
fn reachable(host: &str, port: u16, one_host: bool) -> io::Result<Vec<SocketAddr>> {
    let is_private = if is_loopback(host) { one_host } else { host.parse::<IpAddr>().is_ok() };
    if is_private { resolve(host, port) } else { Ok(all(port).to_vec()) }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let deadline = Instant::now() + LINGER;
        while !lock(&self.shared.connections).is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.shared.stop.store(true, Ordering::Release);
        for stream in lock(&self.shared.connections).values() {
            // A connection that is closed already needs no closing.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let mut wake = self.address;
        if wake.ip().is_unspecified() {
            wake.set_ip(if wake.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
        }
        // Wakes the acceptor, which then sees `stop`. If even this fails it stays until the process ends.
        if TcpStream::connect_timeout(&wake, LINGER).is_ok() {
            let _ = self.acceptor.take().map(JoinHandle::join);
        }
    }
}

fn out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Tells a client that there is no room for it.
fn turn_away(mut stream: TcpStream) {
    // A client that is gone needs no answer.
    let _ = stream.set_nonblocking(true).and_then(|()| stream.write_all(wire::FULL));
    // Closing with its greeting unread would reset the connection, and the answer with it.
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(Duration::from_millis(100))));
    let _ = io::copy(&mut stream.take(64), &mut io::sink());
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        // A descriptor to accept with once there is no other, so that whoever calls hears why it is not served.
        let mut spare = listener.try_clone().ok();
        for number in 0.. {
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
            let Ok(copy) = stream.try_clone() else {
                turn_away(stream);
                continue;
            };
            let mut connections = lock(&self.connections);
            if connections.len() >= MAX_CONNECTIONS {
                drop(connections);
                turn_away(stream);
                continue;
            }
            connections.insert(number, copy);
            drop(connections);
            let shared = self.clone();
            let serving = std::thread::Builder::new().name("store-client".into()).spawn(move || {
                // Ends with the connection; a client that misbehaves is dropped and learns it from that.
                let _ = shared.serve(stream);
                lock(&shared.connections).remove(&number);
            });
            if serving.is_err() {
                lock(&self.connections).remove(&number);
            }
        }
    }

    fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        wire::read_greeting(&mut stream)?;
        stream.write_all(wire::GREETING)?;
        stream.set_read_timeout(None)?;
        loop {
            let request = wire::read_request(&mut stream)?;
            let (status, value) = self.answer(request);
            wire::write_reply(&mut stream, status, &value)?;
        }
    }

    fn answer(&self, request: Request) -> (u8, Vec<u8>) {
        let Request { operation, key, value } = request;
        let refuse = |why: &str| (wire::REFUSED, why.as_bytes().to_vec());
        let found = |value: Option<&Vec<u8>>| value.map_or((wire::NONE, vec![]), |value| (wire::OK, value.clone()));
        let mut entries = lock(&self.entries);
        match operation {
            wire::SET => match entries.set(key, value) {
                Ok(()) => self.changed.notify_all(),
                Err(why) => return refuse(why),
            },
            wire::GET => return found(entries.values.get(&key)),
            wire::ADD => {
                let Ok(amount) = value.try_into().map(i64::from_le_bytes) else { return refuse("not a number") };
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
                let keys: Vec<&str> = keys.take_while(|candidate| candidate.starts_with(&key)).collect();
                return (wire::OK, keys.join("\0").into_bytes());
            }
            wire::WAIT => {
                let Ok(wait) = value.try_into().map(u32::from_le_bytes) else { return refuse("not a duration") };
                let deadline = Instant::now() + Duration::from_millis(wait.into()).min(MAX_WAIT);
                loop {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || entries.values.contains_key(&key) {
                        return found(entries.values.get(&key));
                    }
                    entries = self.changed.wait_timeout(entries, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
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

    #[test]
    fn a_name_is_served_on_all_interfaces() {
        // Whatever its addresses are here, if it has any.
        for host in ["node0", "job-master-0.job.svc", &super::super::this_host()] {
            assert_eq!(reachable(host, 7, true).unwrap(), all(7), "{host}");
        }
        let address = SocketAddr::new("192.0.2.1".parse().unwrap(), 7);
        assert_eq!(reachable("192.0.2.1", 7, false).unwrap(), [address]);
    }

    #[test]
    fn the_loopback_interface_is_enough_for_ranks_of_one_machine_alone() {
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 7);
        for (host, ip) in [("localhost", "127.0.0.1"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1")] {
            let private = reachable(host, 7, true).unwrap();
            assert!(
                private.contains(&at(ip)) && private.iter().all(|address| address.ip().is_loopback()),
                "{host}: {private:?}"
            );
            assert_eq!(reachable(host, 7, false).unwrap(), all(7), "{host}");
        }
    }

    #[test]
    fn a_client_that_there_is_no_room_for_is_told_so() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = std::thread::spawn(move || turn_away(listener.accept().unwrap().0));
        let refused = super::super::TcpStore::connect("127.0.0.1", port, Duration::from_secs(5), None).err().unwrap();
        serving.join().unwrap();
        let message = refused.to_string();
        assert!(message.contains("ulimit -n") && !message.contains("MASTER_PORT"), "{message}");
    }
}
