//! Where an export is found, as an NBD URI: what libnbd, QEMU and fio take, whatever is in the path of the socket.

use std::fmt::Write;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A place where exports are served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    Unix(PathBuf),
    Tcp {
        address: SocketAddr,
        /// Clients must secure their connection.
        tls: bool,
    },
}

impl Place {
    /// The export's URI at this place.
    pub fn uri(&self, export: &str) -> String {
        match self {
            Place::Unix(socket) => of_socket(socket, export),
            Place::Tcp { address, tls } => {
                let scheme = if *tls { "nbds" } else { "nbd" };
                format!("{scheme}://{address}/{}", encoded(export.as_bytes()))
            }
        }
    }
}

/// The URI of an export that is served on a unix socket.
pub fn of_socket(socket: &Path, export: &str) -> String {
    format!("nbd+unix:///{}?socket={}", encoded(export.as_bytes()), encoded(socket.as_os_str().as_bytes()))
}

/// Bytes as they may stand in a path or in a value of a query: everything but what nobody takes for anything else is
/// written as `%XX`.
fn encoded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b'@' | b':' => {
                text.push(char::from(*byte));
            }
            _ => write!(text, "%{byte:02X}").expect("text takes whatever is written"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn whatever_has_a_meaning_in_a_uri_is_encoded() {
        let plain = of_socket(Path::new("/home/me/.holdfast/grid/nbd.sock"), "vm1@monday");
        assert_eq!(plain, "nbd+unix:///vm1@monday?socket=/home/me/.holdfast/grid/nbd.sock");
        let odd = of_socket(Path::new("/my grid?&%#+é{}/nbd.sock"), "a b");
        assert_eq!(odd, "nbd+unix:///a%20b?socket=/my%20grid%3F%26%25%23%2B%C3%A9%7B%7D/nbd.sock");
        let no_text = of_socket(Path::new(OsStr::from_bytes(b"/\xff/s")), "v");
        assert_eq!(no_text, "nbd+unix:///v?socket=/%FF/s");
    }

    #[test]
    fn places_on_the_network_say_whether_they_are_secured() {
        let address = "[::1]:10809".parse().unwrap();
        assert_eq!(Place::Tcp { address, tls: false }.uri("v"), "nbd://[::1]:10809/v");
        assert_eq!(Place::Tcp { address, tls: true }.uri("v"), "nbds://[::1]:10809/v");
    }
}
