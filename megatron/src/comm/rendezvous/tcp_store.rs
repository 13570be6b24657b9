//! A rank's connection to a store served over TCP.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::waiting::{Notify, Waiting};
use super::wire::{self, Request};
use super::{Store, number};
use crate::comm::inbox::lock;
use crate::comm::pending_connections::Timed;
use crate::comm::secret::{ONE_SECRET, Secret, introduce};
use crate::text::printable;
use crate::{Error, Result};

/// Time limit for the server's greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a store may close new connections, as it does when strangers make many.
const BUSY: Duration = Duration::from_secs(10);
/// Longest single wait on the server; longer waits are repeated requests.
const WAIT_STEP: Duration = Duration::from_secs(1);
/// Time for a reply in addition to the requested wait.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// A client of a [`super::StoreServer`].
pub struct TcpStore {
    address: String,
    stream: Mutex<TcpStream>,
}

/// The socket addresses of `host:port`.
pub(crate) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.collect())
}

/// Tries each address of `host:port` once.
pub(crate) fn connect_once(host: &str, port: u16, patience: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in resolve(host, port)? {
        match TcpStream::connect_timeout(&address, patience.max(Duration::from_millis(1))) {
            // If there is no listener, a connection to a local port of the dynamic range may
            // connect to itself.
            Ok(stream) if stream.local_addr()? != stream.peer_addr()? => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok(_) => last = io::ErrorKind::ConnectionRefused.into(),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Whether the server closed the connection before it had sent everything.
fn was_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

impl TcpStore {
    /// Connects to the store at `host:port` within `timeout`; the store may not be running yet.
    /// Calls `notify` if this takes long.
    ///
    /// # Errors
    /// If nothing listens there in time, the listener is not a store, or the store has another
    /// secret.
    pub fn connect(
        host: &str,
        port: u16,
        timeout: Duration,
        secret: &Secret,
        notify: Option<Notify>,
    ) -> Result<Self> {
        let mut waiting = Waiting::new(notify);
        let address = format!("{host}:{port}");
        let deadline = Instant::now() + timeout;
        let mut pause = Duration::from_millis(5);
        // Until this time, a connection that is closed during the greeting counts as one of too
        // many.
        let mut busy = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match connect_once(host, port, left.min(Duration::from_secs(5))) {
                Ok(stream) => match Self::greet(&stream, secret) {
                    Ok(()) => return Ok(Self { address, stream: Mutex::new(stream) }),
                    Err(e)
                        if was_closed(&e)
                            && Instant::now()
                                < *busy.get_or_insert_with(|| Instant::now() + BUSY) =>
                    {
                        std::thread::sleep(pause.min(left));
                    }
                    Err(e) => return Err(Self::refused(&address, &e)),
                },
                Err(e) if left <= pause => {
                    return Err(Error::comm(format!(
                        "rendezvous: cannot reach {address} within {:.0} s: {e}; check that rank 0 \
                         is running, and check MASTER_ADDR and MASTER_PORT",
                        timeout.as_secs_f64()
                    )));
                }
                Err(e) => {
                    waiting.notify(|| format!("waiting for rank 0 at {address}: {e}"));
                    std::thread::sleep(pause);
                }
            }
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    fn refused(address: &str, e: &io::Error) -> Error {
        match e.kind() {
            io::ErrorKind::PermissionDenied => Error::config(format!(
                "rendezvous: the store at {address} refuses this rank: {e}; {ONE_SECRET}"
            )),
            io::ErrorKind::QuotaExceeded => Error::comm(format!(
                "rendezvous: the store at {address} rejected this rank: {e}; raise the limit on \
                 open files (`ulimit -n`) where rank 0 or the launcher starts"
            )),
            _ => Error::config(format!(
                "rendezvous: {address} does not answer as a rendezvous store: {e}; choose a MASTER_PORT that no other \
                 program uses"
            )),
        }
    }

    fn greet(stream: &TcpStream, secret: &Secret) -> io::Result<()> {
        let mut timed = Timed::new(stream, GREETING_TIMEOUT);
        let hear =
            |stream: &mut Timed| wire::read_greeting(stream).map(|()| wire::GREETING.to_vec());
        let greeted = introduce(&mut timed, secret, wire::GREETING, hear)
            .and_then(|()| timed.read_exact(&mut [0]));
        greeted.and_then(|()| stream.set_read_timeout(None)).map_err(|e| match e.kind() {
            // The system's own text would be "resource temporarily unavailable".
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let seconds = GREETING_TIMEOUT.as_secs();
                io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("it accepts connections, but sends nothing for {seconds} s"),
                )
            }
            _ => e,
        })
    }

    /// This machine's address on the connection to the store.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        lock(&self.stream).local_addr().ok().map(|address| address.ip())
    }

    /// The address at which the store was found.
    pub(crate) fn peer_ip(&self) -> Option<IpAddr> {
        lock(&self.stream).peer_addr().ok().map(|address| address.ip())
    }

    fn ask(
        &self,
        operation: u8,
        key: &str,
        value: &[u8],
        wait: Duration,
    ) -> Result<Option<Vec<u8>>> {
        let request = Request { operation, key: key.into(), value: value.into() };
        let exchange = || {
            let stream = &mut *lock(&self.stream);
            stream.set_read_timeout(Some(wait + REPLY_TIMEOUT))?;
            wire::write_request(stream, &request)?;
            wire::read_reply(stream)
        };
        match exchange() {
            Ok((wire::OK, value)) => Ok(Some(value)),
            Ok((wire::NONE, _)) => Ok(None),
            Ok((_, why)) => Err(Error::comm(format!(
                "rendezvous store {}: key {key}: {}",
                self.address,
                printable(&why)
            ))),
            Err(e) => Err(Error::comm(format!(
                "rendezvous store {}: {e}; the process that serves it (rank 0 or the launcher) may have ended",
                self.address
            ))),
        }
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(wire::SET, key, value, Duration::ZERO).map(drop)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.ask(wire::GET, key, &[], Duration::ZERO)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        number(key, self.ask(wire::ADD, key, &amount.to_le_bytes(), Duration::ZERO)?.as_deref())
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>> {
        let keys = self.ask(wire::LIST, prefix, &[], Duration::ZERO)?.unwrap_or_default();
        let keys = keys.split(|byte| *byte == 0).filter(|key| !key.is_empty());
        Ok(keys.map(|key| String::from_utf8_lossy(key).into_owned()).collect())
    }

    fn close(&self) -> Result<()> {
        self.ask(wire::CLOSE, "", &[], Duration::ZERO).map(drop)
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let step = left.min(WAIT_STEP);
            let found =
                self.ask(wire::WAIT, key, &(step.as_millis() as u32).to_le_bytes(), step)?;
            if found.is_some() || left <= step {
                return Ok(found);
            }
        }
    }
}
