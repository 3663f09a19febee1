//! A webhook and a mail server, for what a host tells people.

use super::text;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

/// Takes what a webhook is sent, and what a mail server is; each whole message is told.
pub fn receivers() -> (u16, u16, std::sync::mpsc::Receiver<String>) {
    let (told, heard) = std::sync::mpsc::channel();
    let serve = |converse: fn(TcpStream) -> Option<String>| {
        let (listener, told) = (TcpListener::bind("127.0.0.1:0").expect("a port"), told.clone());
        let port = listener.local_addr().expect("an address").port();
        std::thread::spawn(move || {
            listener.incoming().flatten().filter_map(converse).try_for_each(|message| told.send(message))
        });
        port
    };
    (serve(webhook), serve(mail_server), heard)
}

fn webhook(stream: TcpStream) -> Option<String> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    (&stream).write_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").ok()?;
    Some(text(&body))
}

/// As RFC 5321 has it, for one message.
fn mail_server(stream: TcpStream) -> Option<String> {
    let (mut reader, mut message, mut is_data) = (BufReader::new(stream.try_clone().ok()?), String::new(), false);
    let say = |line: &str| (&stream).write_all(format!("{line}\r\n").as_bytes()).ok();
    say("220 here")?;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return Some(message).filter(|message| !message.is_empty());
        }
        message.push_str(&line);
        match (is_data, line.trim_end().to_uppercase().as_str()) {
            (true, ".") => {
                is_data = false;
                say("250 taken")?;
            }
            (true, _) => {}
            (false, "DATA") => {
                is_data = true;
                say("354 go on")?;
            }
            (false, "QUIT") => {
                say("221 bye")?;
                return Some(message);
            }
            (false, _) => say("250 ok")?,
        }
    }
}
