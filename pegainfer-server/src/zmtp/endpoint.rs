//! Where a socket listens, or what it connects to.

use std::fmt;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::str::FromStr;
use thiserror::Error;

/// An address of ZeroMQ's form: `tcp://*:5557`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Why an endpoint cannot be used, as a sentence without its name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EndpointError {
    /// It has another form.
    #[error("{0:?} is not an endpoint such as tcp://*:5557")]
    Malformed(String),
    /// The port plus the number of the engine is too large.
    #[error("{0} has no port for engine {1}: ports end at 65535")]
    NoPort(Endpoint, u16),
    /// It cannot be listened on.
    #[error("{0}")]
    Refused(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let malformed = || EndpointError::Malformed(text.to_owned());
        let (host, port) = text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(malformed)?;
        let port = port.parse().map_err(|_| malformed())?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let is_host = host == "*" || host.parse::<Ipv6Addr>().is_ok() || host.chars().all(is_name);
        if host.is_empty() || !is_host {
            return Err(malformed());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "tcp://[{}]:{}", self.host, self.port),
            false => write!(f, "tcp://{}:{}", self.host, self.port),
        }
    }
}

impl Endpoint {
    /// The endpoint of engine `rank`: the port is larger by its number, unless it is 0, a free one.
    pub fn of_rank(&self, rank: u16) -> Result<Self, EndpointError> {
        let port = match self.port {
            0 => Some(0),
            port => port.checked_add(rank),
        };
        let port = port.ok_or_else(|| EndpointError::NoPort(self.clone(), rank))?;
        Ok(Self { host: self.host.clone(), port })
    }

    /// True if it is to be listened on, and not to be connected to: vLLM's rule. It has a `*` or a `::`, or is the
    /// address 0.0.0.0, which nobody can connect to.
    pub fn is_bound(&self) -> bool {
        self.host == "*" || self.host.contains("::") || self.host == "0.0.0.0"
    }

    /// True if it may be listened on: it has no name, but an address.
    pub fn can_be_bound(&self) -> bool {
        self.ip().is_some()
    }

    /// Address to listen on; `None` if there is only a name.
    fn ip(&self) -> Option<IpAddr> {
        match &self.host[..] {
            "*" => Some(Ipv4Addr::UNSPECIFIED.into()),
            "localhost" => Some(Ipv4Addr::LOCALHOST.into()),
            host => host.parse().ok(),
        }
    }

    /// Host and port to connect to.
    pub fn target(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// Listens. Also returns the endpoint with its port, and without a `*` in place of a host: with `host`.
    pub fn listen(&self, host: &str) -> Result<(TcpListener, Self), EndpointError> {
        let ip = self.ip().ok_or_else(|| {
            EndpointError::Refused(format!("{self} has a name: give an address of this machine, or *"))
        })?;
        let address = SocketAddr::new(ip, self.port);
        let listener = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        });
        let (listener, port) = listener.map_err(|error| {
            EndpointError::Refused(match error.kind() {
                ErrorKind::AddrInUse => format!("port {} is in use: give another one", self.port),
                ErrorKind::PermissionDenied => format!("port {} needs more rights: give one above 1023", self.port),
                ErrorKind::AddrNotAvailable => format!("{} is not an address of this machine", self.host),
                _ => format!("{self} cannot be listened on: {error}"),
            })
        })?;
        let host = if ip.is_unspecified() { host } else { &self.host };
        Ok((listener, Self { host: host.to_owned(), port }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written() {
        for (text, is_bound) in [
            ("tcp://*:5557", true),
            ("tcp://[::]:5557", true),
            ("tcp://0.0.0.0:1", true),
            ("tcp://127.0.0.1:5557", false),
            ("tcp://kv-indexer.llm-d.svc:5557", false),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!((endpoint.to_string(), endpoint.is_bound()), (text.to_owned(), is_bound));
        }
        for bad in
            ["", "tcp://", "tcp://*", "tcp://*:", "tcp://:5557", "tcp://*:70000", "ipc:///x", "tcp://a b:1", "5557"]
        {
            let error = bad.parse::<Endpoint>().unwrap_err();
            assert!(error.to_string().contains("tcp://*:5557"), "{error}");
        }
    }

    #[test]
    fn each_rank_has_its_port() {
        let endpoint: Endpoint = "tcp://*:5557".parse().unwrap();
        assert_eq!(endpoint.of_rank(3).unwrap().to_string(), "tcp://*:5560");
        assert_eq!("tcp://*:0".parse::<Endpoint>().unwrap().of_rank(3).unwrap().to_string(), "tcp://*:0");
        let last: Endpoint = "tcp://*:65535".parse().unwrap();
        assert!(last.of_rank(0).is_ok() && last.of_rank(1).is_err());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let any: Endpoint = "tcp://*:0".parse().unwrap();
        let (listener, bound) = any.listen("10.0.0.1").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(bound.to_string(), format!("tcp://10.0.0.1:{port}"));
        let again: Endpoint = format!("tcp://*:{port}").parse().unwrap();
        let error = again.listen("x").unwrap_err().to_string();
        assert_eq!(error, format!("port {port} is in use: give another one"));
        let elsewhere: Endpoint = "tcp://192.0.2.1:5557".parse().unwrap();
        assert!(elsewhere.listen("x").unwrap_err().to_string().contains("not an address of this machine"));
    }
}
