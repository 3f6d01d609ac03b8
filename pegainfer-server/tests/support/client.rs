//! A blocking HTTP/1.1 client: tests see the raw bytes and choose when to disconnect.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A response whose body may not have arrived yet.
pub struct Response {
    pub status: u16,
    headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
}

/// `body` with more fields.
pub fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Sends a request and reads the head of the response.
pub fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    read_head(write(address, method, path, headers, body))
}

/// Sends a request and leaves the response unread.
pub fn write(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += &format!("Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// Reads the status line and the headers.
pub fn read_head(stream: TcpStream) -> Response {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
    let mut headers = vec![];
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_string()));
    }
    Response { status, headers, reader }
}

const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

/// Posts JSON.
pub fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    send(address, "POST", path, &JSON, body.to_string().as_bytes())
}

/// Posts JSON and expects 200 and JSON.
pub fn post_ok(address: SocketAddr, path: &str, body: &Value) -> Value {
    let response = post(address, path, body);
    let (status, response) = (response.status, response.json());
    assert_eq!(status, 200, "{body} got {response}");
    response
}

/// Posts JSON with one more header.
pub fn post_with(address: SocketAddr, path: &str, header: (&str, &str), body: &Value) -> Response {
    send(address, "POST", path, &[JSON[0], header], body.to_string().as_bytes())
}

/// Posts JSON and leaves the response unread.
pub fn post_unread(address: SocketAddr, path: &str, body: &Value) -> TcpStream {
    write(address, "POST", path, &JSON, body.to_string().as_bytes())
}

/// Gets a path.
pub fn get(address: SocketAddr, path: &str) -> Response {
    send(address, "GET", path, &[], b"")
}

impl Response {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// One chunk of a chunked body; `None` at the end.
    pub fn chunk(&mut self) -> Option<String> {
        let mut size = String::new();
        self.reader.read_line(&mut size).unwrap();
        let size = usize::from_str_radix(size.trim(), 16).ok().filter(|&n| n > 0)?;
        let mut bytes = vec![0; size + 2];
        self.reader.read_exact(&mut bytes).unwrap();
        bytes.truncate(size);
        Some(String::from_utf8(bytes).unwrap())
    }

    /// The body as sent, including chunk headers.
    pub fn reader(self) -> impl Read {
        self.reader
    }

    /// The whole body.
    pub fn text(mut self) -> String {
        let mut text = String::new();
        if self.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                text += &chunk;
            }
        } else {
            self.reader.read_to_string(&mut text).unwrap();
        }
        text
    }

    /// The whole body as JSON.
    pub fn json(self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text:?}"))
    }

    /// The events of a stream, without `data: ` and comments. The last one must be `[DONE]`, which is left out.
    pub fn events(self) -> Vec<Value> {
        assert_eq!(self.status, 200);
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let text = self.text();
        let body = text.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("no [DONE] in {text:?}"));
        let events = body.split_terminator("\n\n").filter(|event| !event.starts_with(':'));
        let events = events.map(|event| event.strip_prefix("data: ").unwrap());
        events.map(|json| serde_json::from_str(json).unwrap()).collect()
    }
}
