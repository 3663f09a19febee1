//! All keys of `holdfast.toml`, in one table: it drives reading, checking, explaining and the reference's page.

use super::HostSettings;
use crate::grid::layout::HostConfig;
use crate::node;
use holdfast_base::size::Size;
use holdfast_format::schedule::{NoSpan, Span};
use holdfast_host::Isolation;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How a value is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A number of bytes between these.
    Size(u64, u64),
    /// A number of seconds between these.
    Span(u64, u64),
    /// An address of this machine with a port.
    Address,
    /// An absolute path.
    Directory,
    /// A share up to this, in per cent, or `off`.
    Share(u32),
    /// A group of users of this machine.
    Group,
    /// `on` or `off`.
    Switch,
    /// A count up to this, or `auto`.
    Threads(u32),
    /// One of [`ISOLATIONS`].
    Isolation,
    /// An address with one of these schemes.
    Url(&'static [&'static str]),
    /// Mail addresses up to so many, with commas between them.
    Mailboxes(usize),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    Size(Size),
    Span(Duration),
    Address(SocketAddr),
    Directory(PathBuf),
    /// In per cent; zero is `off`.
    Share(u32),
    Group(String),
    Switch(bool),
    /// Zero is `auto`.
    Threads(u32),
    /// Nothing is `off`.
    Isolation(Option<Isolation>),
    /// An address, or several.
    Text(String),
}

/// How volumes of a host are kept from each other, from most on.
const ISOLATIONS: [(&str, Option<Isolation>); 4] = [
    ("strict", Some(Isolation::Strict)),
    ("balanced", Some(Isolation::Balanced)),
    ("rate", Some(Isolation::Rate)),
    ("off", None),
];

/// One key.
pub struct Key {
    pub name: &'static str,
    pub kind: Kind,
    /// As it would be written; empty where there is none.
    pub default: &'static str,
    pub example: &'static str,
    /// One sentence.
    pub brief: &'static str,
    /// What is worth knowing before it is changed.
    pub more: &'static str,
    /// Its name among `host` in the `grid.json` of releases that had no `holdfast.toml`; empty where they did not have it.
    pub older_name: &'static str,
    /// What such a `grid.json` says.
    pub older: fn(&HostConfig) -> Option<Value>,
    pub put: fn(&mut HostSettings, Value),
}

const MIB: u64 = 1 << 20;
const YEAR_S: u64 = 365 * 24 * 3600;

/// More than machines have cores for.
const REACTORS_MAX: u32 = 64;

/// What `cache.reads` takes.
pub const READ_CACHE: Kind = Kind::Share(50);

/// Its default, for nodes that have no such file.
pub const READ_CACHE_PERCENT: u32 = 10;

/// By section, as in the file.
pub const KEYS: &[Key] = &[
    Key {
        name: "nbd.tcp",
        kind: Kind::Address,
        default: "",
        example: "10.0.0.1:10809",
        brief: "Address and port for NBD over TCP, besides the unix socket.",
        more: "By default there is only the unix socket `nbd.sock` in the grid's directory. Who can reach the port \
               can read and write every volume, unless `nbd.tls_dir` is set with a `ca-cert.pem`. So an address that \
               other machines reach is served only with `nbd.tls_dir`, or where `nbd.open` says that it may be open \
               to all. Otherwise the host starts without it, and says so in its log and in `holdfast status`. \
               Several hosts of a grid each have an address of their own. Volumes that are for certain clients alone \
               (`holdfast volume allow`) nobody gets without TLS. `holdfast grid up --nbd-tcp` sets it when the grid \
               is made.",
        older_name: "nbd_tcp",
        older: |host| host.nbd_tcp.map(Value::Address),
        put: |settings, value| settings.nbd_tcp = value.address(),
    },
    Key {
        name: "nbd.tls_dir",
        kind: Kind::Directory,
        default: "",
        example: "/etc/holdfast/nbd-tls",
        brief: "Directory with the certificates that secure NBD over TCP.",
        more: "Its files are `server-cert.pem` and `server-key.pem`. With a `ca-cert.pem` beside them, clients need \
               a certificate of that authority. `holdfast grid tls server` makes all three by the grid's own \
               authority, and `holdfast grid tls client` the clients'. Files that are replaced count from the next \
               connection on. Certificates that the grid's authority has signed the host makes anew itself, where it \
               may write to the directory: under systemd inside the grid's. Links between hosts and nodes have \
               certificates of the grid's own (`holdfast grid tls show`). Needs `nbd.tcp`.",
        older_name: "tls_dir",
        older: |host| host.tls_dir.clone().map(Value::Directory),
        put: |settings, value| settings.tls_dir = value.directory(),
    },
    Key {
        name: "nbd.open",
        kind: Kind::Switch,
        default: "off",
        example: "on",
        brief: "NBD over TCP without TLS for other machines, too.",
        more: "Everybody who reaches the address can then read, overwrite and discard every volume that is not for \
               certain clients alone. So it is for a network of which every machine may do all of that. The key \
               means nothing where `nbd.tcp` is an address of the machine itself (127.0.0.1), or `nbd.tls_dir` is \
               set. Releases that did not have this key served any address. After an update the unix socket and \
               other hosts go on, and this port waits until one of both is set. `holdfast grid up --nbd-open` sets \
               it when the grid is made.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.nbd_open = value.is_on(),
    },
    Key {
        name: "memory.writeback",
        kind: Kind::Size(MIB, MIB << 20),
        default: "256 MiB",
        example: "1 GiB",
        brief: "Memory of the host for log entries that are no segments yet, over all volumes.",
        more: "More of it makes segments larger and overwritten blocks cheaper, and recovery after a crash of the \
               host longer: it reads as much from the nodes. Writers are slowed from half of it on. Volumes share it \
               equally.",
        older_name: "writeback_bytes",
        older: |host| host.writeback_bytes.map(|bytes| Value::Size(Size(bytes))),
        put: |settings, value| settings.writeback_bytes = value.count(),
    },
    Key {
        name: "memory.map_cache",
        kind: Kind::Size(MIB, MIB << 20),
        default: "64 MiB",
        example: "256 MiB",
        brief: "Memory of the host for parts of volumes' maps that are in use, over all volumes.",
        more: "A read of a block whose part of the map is not in memory costs one more read from the nodes. Volumes \
               share it equally.",
        older_name: "map_cache_bytes",
        older: |host| host.map_cache_bytes.map(|bytes| Value::Size(Size(bytes))),
        put: |settings, value| settings.map_cache_bytes = value.count(),
    },
    Key {
        name: "memory.read_ahead",
        kind: Kind::Size(0, MIB << 20),
        default: "64 MiB",
        example: "16 MiB",
        brief: "Memory of the host for reading ahead of clients that read in order, over all volumes.",
        more: "Clients gain by it that read in order what was written at random: blocks that they want soon lie \
               beside what they want now, and are read with it. Volumes share it equally, up to 32 MiB each; `0 B` \
               turns it off.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.read_ahead_bytes = value.count(),
    },
    Key {
        name: "care.rebuild_after",
        kind: Kind::Span(1, YEAR_S),
        default: "10 min",
        example: "1 h",
        brief: "Time after which data of an absent node or a slow device are made again elsewhere.",
        more: "Until then volumes are read and written without it, less redundant than promised. Shorter means less \
               time at risk; longer means no needless copying for a node that is restarted or moved. `holdfast node \
               stop` counts it, too.",
        older_name: "rebuild_after_s",
        older: |host| host.rebuild_after_s.map(|seconds| Value::Span(Duration::from_secs(seconds.max(1)))),
        put: |settings, value| settings.rebuild_after = Duration::from_secs(value.count()),
    },
    Key {
        name: "care.scrub_every",
        kind: Kind::Span(1, YEAR_S),
        default: "14 d",
        example: "7 d",
        brief: "Time in which every shard is read and checked once.",
        more: "Damage that nobody reads is found no later than this. A shorter time costs device reads all the \
               while.",
        older_name: "scrub_every_s",
        older: |host| host.scrub_every_s.map(|seconds| Value::Span(Duration::from_secs(seconds.max(1)))),
        put: |settings, value| settings.scrub_every = Duration::from_secs(value.count()),
    },
    Key {
        name: "cpu.reactors",
        kind: Kind::Threads(REACTORS_MAX),
        default: "auto",
        example: "4",
        brief: "Threads of the host that serve volumes, each with volumes of its own.",
        more: "By default half of the machine's cores, one at least: the others are for nodes and guests. Volumes are spread \
               over these threads, and so is the memory above. One volume is served by one thread. In a grid of several \
               machines a volume's id says which thread serves it.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.reactors = value.threads(),
    },
    Key {
        name: "cpu.node_reactors",
        kind: Kind::Threads(node::REACTORS_MAX),
        default: "auto",
        example: "2",
        brief: "Threads of each node, each with some of its devices.",
        more: "By default one a device, up to a quarter of the machine's cores, one at least. Hosts connect to each of them. \
               Hosts of older releases ask the first, which passes on what is for devices of others. A read cache \
               (`cache.reads`) serves the devices of its own thread: slower devices are put where a fast one is. Nodes read \
               this key when they start.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.node_reactors = value.some_threads(),
    },
    Key {
        name: "qos.isolation",
        kind: Kind::Isolation,
        default: "off",
        example: "balanced",
        brief: "Isolation of the volumes of a host from each other.",
        more: "While guests of several volumes ask, no more is under way at a time than latency allows. Bounds are 1.3 times \
               (`strict`), 4 times (`balanced`) or 10 times (`rate`) of what it is when little is under way. The rest waits in \
               the host, where a guest with few requests goes before one with hundreds. Less under way is less done in all. A \
               volume that is alone has no such bound, and with `off` none has. Limits of volumes are kept in any case.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.isolation = value.isolation(),
    },
    Key {
        name: "reduce.share",
        kind: Kind::Share(100),
        default: "10 %",
        example: "25 %",
        brief: "Share of the machine's CPU that packing blocks may take while guests work.",
        more: "Blocks of volumes with `--compress` for which there is no time are written as they are, and packed when guests \
               rest. More means less space until then, and less CPU for guests. With `off` nothing is packed while they work. \
               `holdfast grid status` shows what packing takes.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.packing_percent = value.share(),
    },
    Key {
        name: "reduce.idle_share",
        kind: Kind::Share(100),
        default: "50 %",
        example: "off",
        brief: "The same, while no guest of the host has asked for anything for a second.",
        more: "One thread for each of `cpu.reactors` packs, at a low priority: it takes a core at most. With `off` what is \
               written as it is stays so until guests work again.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.packing_idle_percent = value.share(),
    },
    Key {
        name: "cache.reads",
        kind: READ_CACHE,
        default: "10 %",
        example: "off",
        brief: "Share of a fast device for copies of what is read often from slower ones.",
        more: "In a node with devices of several classes (`holdfast device list`), blocks that are read again and \
               again from the slower ones are kept on one of the fastest. They take free space, which is given back \
               as soon as data needs it. Blocks that are read once, by a backup say, are not kept. The cache takes \
               up to 8 MiB of the node's memory for each GiB, 256 MiB at most, and begins empty when the node is \
               started. Nodes read this key when they start, and do without such copies where the file is wrong. \
               `holdfast device list` shows how much is kept and how often it was of use.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.read_cache_percent = value.share(),
    },
    Key {
        name: "control.readers",
        kind: Kind::Group,
        default: "",
        example: "holdfast-readers",
        brief: "Group of users who may look at the grid with this program, and change nothing.",
        more: "They may give `holdfast status`, and what lists, shows and explains. By default only the user that \
               runs the host, and root, can ask it anything: `control.sock` in the grid's directory is theirs alone. \
               With a group there is a `reader.sock` for that beside it. Members must be able to enter the grid's \
               directory. A group that is not in `/etc/group` is named by its number.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.readers = value.group(),
    },
    Key {
        name: "api.tcp",
        kind: Kind::Address,
        default: "",
        example: "10.0.0.1:8443",
        brief: "Address and port for the HTTP interface over TLS, besides the unix socket.",
        more: "By default there is only `api.sock` in the grid's directory. Over the network callers are known by a \
               certificate or a token that this grid's authority has signed (`holdfast grid tls operator`), and nobody \
               else is answered. Needs `api.tls_dir`, and a grid with TLS.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.api_tcp = value.address(),
    },
    Key {
        name: "api.tls_dir",
        kind: Kind::Directory,
        default: "",
        example: "/etc/holdfast/nbd-tls",
        brief: "Directory with the certificate of the HTTP interface, which may be that of `nbd.tls_dir`.",
        more: "Its files are `server-cert.pem` and `server-key.pem`, by which callers know this host: \
               `holdfast grid tls server` makes them, and so may any other authority that callers trust. Files that \
               are replaced count from the next connection on; the host renews them as those of `nbd.tls_dir`.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.api_tls_dir = value.directory(),
    },
    Key {
        name: "alerts.webhook",
        kind: Kind::Url(&["https://", "http://"]),
        default: "",
        example: "https://chat.example.org/hooks/x1",
        brief: "Address to which the host posts what is not well, when it comes and when it is over.",
        more: "Each is an object in JSON, with `text` for people, which chats show. A warning has to stand for a minute, \
               and what is critical for 10 s. Over is what was away for a minute. One host tells for all, the \
               steward, so set it on each. `holdfast alerts test` tries it.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.alerts.webhook = value.line(),
    },
    Key {
        name: "alerts.smtp",
        kind: Kind::Url(&["smtps://", "smtp://"]),
        default: "",
        example: "smtps://holdfast@mail.example.org:465",
        brief: "Mail server by which the host sends the same.",
        more: "`smtps://USER@SERVER:465` has TLS from the beginning, `smtp://USER@SERVER:587?tls=required` from \
               STARTTLS on. Plain `smtp://` secures nothing, and is for a server on this machine. Needs \
               `alerts.mail_from` and `alerts.mail_to`.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.alerts.smtp = value.line(),
    },
    Key {
        name: "alerts.smtp_password_file",
        kind: Kind::Directory,
        default: "",
        example: "/etc/holdfast/smtp-password",
        brief: "File with the password of the user that `alerts.smtp` names.",
        more: "The host reads it each time, so another one counts from the next mail on. Nobody else should read it.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.alerts.smtp_password_file = value.directory(),
    },
    Key {
        name: "alerts.mail_from",
        kind: Kind::Mailboxes(1),
        default: "",
        example: "holdfast@example.org",
        brief: "Sender of such mail.",
        more: "Many servers take only what the user may send as.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.alerts.mail_from = value.line(),
    },
    Key {
        name: "alerts.mail_to",
        kind: Kind::Mailboxes(16),
        default: "",
        example: "ann@example.org, on-call@example.org",
        brief: "Who gets such mail.",
        more: "With commas between them.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.alerts.mail_to = value.line(),
    },
    Key {
        name: "authority.spread",
        kind: Kind::Switch,
        default: "on",
        example: "off",
        brief: "A second machine gets the key of the grid's authority by itself, if only this one has it.",
        more: "With the key machines join, leave, and get new certificates. Without a second machine that has it the \
               loss of the first one would end all that. The key goes from host to host over TLS; `holdfast machine \
               list` shows which machines have it. With `off` it goes by command alone: `holdfast grid tls authority \
               give`, or `export` and `import`.",
        older_name: "",
        older: |_| None,
        put: |settings, value| settings.authority_spread = value.is_on(),
    },
];

/// Keys that one might look for here, and why they are not here.
pub const ELSEWHERE: &[(&str, &str)] = &[
    ("name", "a host's name is chosen by `holdfast grid up --name` and stays: certificates and volumes name it"),
    ("host.name", "a host's name is chosen by `holdfast grid up --name` and stays: certificates and volumes name it"),
    ("grid", "the grid's id is made with it and stands in grid.json"),
    ("nodes", "nodes and devices are added by `holdfast node add` and `holdfast device add`, and stand in grid.json"),
    ("meta", "the metadata store is chosen by `holdfast grid up --etcd` or `holdfast meta import`"),
    ("tls", "TLS between hosts and nodes is chosen by `holdfast grid up --tls`, when a grid is made"),
];

impl Key {
    pub fn section(&self) -> &'static str {
        self.name.split_once('.').map_or("", |(section, _)| section)
    }

    /// Its name within its section.
    pub fn leaf(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, leaf)| leaf)
    }

    /// Who knows the value may do what only some are to.
    pub fn is_secret(&self) -> bool {
        self.name == "alerts.webhook"
    }

    /// The value is the path of a file that is a secret.
    pub fn names_a_secret(&self) -> bool {
        self.name == "alerts.smtp_password_file"
    }
}

impl Kind {
    /// What may be written.
    pub fn text(self) -> String {
        match self {
            Kind::Size(from, to) => format!("a size from {} to {}", Size(from), Size(to)),
            Kind::Span(from, to) => format!("a time from {} to {}", span_text(from), span_text(to)),
            Kind::Address => "an address with a port".to_string(),
            Kind::Directory => "an absolute path".to_string(),
            Kind::Share(to) => format!("a share from 1 % to {to} %, or off"),
            Kind::Group => "a group's name or number".to_string(),
            Kind::Switch => "on or off".to_string(),
            Kind::Threads(to) => format!("a number from 1 to {to}, or auto"),
            Kind::Isolation => "strict, balanced, rate or off".to_string(),
            Kind::Url(schemes) => format!("an address that begins with {}", schemes.join(" or ")),
            Kind::Mailboxes(1) => "a mail address".to_string(),
            Kind::Mailboxes(_) => "mail addresses, with commas between them".to_string(),
        }
    }

    /// The value that `text` stands for, or what is wrong with it.
    pub fn parse(self, text: &str) -> Result<Value, String> {
        let in_range = |count: u64, from: u64, to: u64| match (from..=to).contains(&count) {
            true => Ok(count),
            false => Err(format!("`{text}` is out of range: it is {}", self.text())),
        };
        match self {
            Kind::Size(from, to) => {
                let size: Size = text.parse().map_err(|e: holdfast_base::size::ParseSizeError| e.to_string())?;
                in_range(size.0, from, to).map(|bytes| Value::Size(Size(bytes)))
            }
            Kind::Span(from, to) => {
                let span: Span = text.parse().map_err(|e: NoSpan| e.to_string())?;
                in_range(span.seconds(), from, to).map(|seconds| Value::Span(Duration::from_secs(seconds)))
            }
            Kind::Address => {
                let wrong = |_| format!("`{text}` is no IP address with a port");
                text.parse().map(Value::Address).map_err(wrong)
            }
            Kind::Directory if text.starts_with('/') => Ok(Value::Directory(PathBuf::from(text))),
            Kind::Directory => Err(format!("`{text}` is no absolute path: it has to begin with /")),
            Kind::Group => {
                let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
                match !text.is_empty() && text.chars().all(is_plain) {
                    true => Ok(Value::Group(text.to_string())),
                    false => Err(format!("`{text}` is no group: it is {}", self.text())),
                }
            }
            Kind::Switch => match text {
                "on" => Ok(Value::Switch(true)),
                "off" => Ok(Value::Switch(false)),
                _ => Err(format!("`{text}` is neither: it is {}", self.text())),
            },
            Kind::Isolation => {
                let found = ISOLATIONS.iter().find(|(name, _)| *name == text);
                let isolation = found.map(|(_, isolation)| Value::Isolation(*isolation));
                isolation.ok_or_else(|| format!("`{text}` is none: it is {}", self.text()))
            }
            Kind::Url(schemes) => {
                let is_right = |scheme: &&str| text.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty());
                let is_plain = text.bytes().all(|byte| byte.is_ascii_graphic());
                match is_plain && schemes.iter().any(is_right) {
                    true => Ok(Value::Text(text.to_string())),
                    false => Err(format!("`{text}` is none: it is {}", self.text())),
                }
            }
            Kind::Mailboxes(most) => {
                let is_right = |one: &str| one.trim().parse::<lettre::message::Mailbox>().is_ok();
                match text.split(',').all(is_right) && text.split(',').count() <= most {
                    true => Ok(Value::Text(text.to_string())),
                    false => Err(format!("`{text}` is none: it is {}", self.text())),
                }
            }
            Kind::Threads(_) if text == "auto" => Ok(Value::Threads(0)),
            Kind::Threads(to) => {
                let count: u64 = text.parse().map_err(|_| format!("`{text}` is no number: it is {}", self.text()))?;
                in_range(count, 1, to.into()).map(|count| Value::Threads(count as u32))
            }
            Kind::Share(_) if text == "off" => Ok(Value::Share(0)),
            Kind::Share(to) => {
                let number = text.strip_suffix('%').map(str::trim_end).and_then(|number| number.parse().ok());
                let percent: u64 = number.ok_or_else(|| format!("`{text}` is no share: it is {}", self.text()))?;
                in_range(percent, 1, u64::from(to)).map(|percent| Value::Share(percent as u32))
            }
        }
    }
}

impl Value {
    /// Bytes, or seconds.
    pub fn count(&self) -> u64 {
        match self {
            Value::Size(size) => size.0,
            Value::Span(span) => span.as_secs(),
            _ => unreachable!("the table puts only numbers where numbers go"),
        }
    }

    /// Half of the cores where nobody says how many.
    fn threads(&self) -> usize {
        match self {
            Value::Threads(0) => std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1)),
            Value::Threads(count) => *count as usize,
            _ => unreachable!("the table puts only threads where threads go"),
        }
    }

    /// `None` where nobody says how many.
    fn some_threads(&self) -> Option<u32> {
        match self {
            Value::Threads(count) => Some(*count).filter(|count| *count > 0),
            _ => unreachable!("the table puts only threads where threads go"),
        }
    }

    /// In per cent.
    pub fn share(&self) -> u32 {
        match self {
            Value::Share(percent) => *percent,
            _ => unreachable!("the table puts only shares where shares go"),
        }
    }

    fn isolation(&self) -> Option<Isolation> {
        match self {
            Value::Isolation(isolation) => *isolation,
            _ => unreachable!("the table puts only isolations where isolations go"),
        }
    }

    fn is_on(&self) -> bool {
        match self {
            Value::Switch(is_on) => *is_on,
            _ => unreachable!("the table puts only switches where switches go"),
        }
    }

    fn address(self) -> Option<SocketAddr> {
        match self {
            Value::Address(address) => Some(address),
            _ => unreachable!("the table puts only addresses where addresses go"),
        }
    }

    fn group(self) -> Option<String> {
        match self {
            Value::Group(group) => Some(group),
            _ => unreachable!("the table puts only groups where groups go"),
        }
    }

    fn line(self) -> Option<String> {
        match self {
            Value::Text(text) => Some(text),
            _ => unreachable!("the table puts only texts where texts go"),
        }
    }

    fn directory(self) -> Option<PathBuf> {
        match self {
            Value::Directory(path) => Some(path),
            _ => unreachable!("the table puts only paths where paths go"),
        }
    }

    /// As it is written in the file, without quotes.
    pub fn text(&self) -> String {
        match self {
            // Sizes that print rounded are written exactly.
            Value::Size(size) if size.to_string().parse() == Ok(*size) => size.to_string(),
            Value::Size(size) => size.0.to_string(),
            Value::Span(span) => span_text(span.as_secs()),
            Value::Address(address) => address.to_string(),
            Value::Directory(path) => path.display().to_string(),
            Value::Share(0) => "off".to_string(),
            Value::Share(percent) => format!("{percent} %"),
            Value::Group(group) => group.clone(),
            Value::Text(text) => text.clone(),
            Value::Threads(0) => "auto".to_string(),
            Value::Threads(count) => count.to_string(),
            Value::Isolation(isolation) => {
                let (name, _) = ISOLATIONS.iter().find(|(_, of)| of == isolation).expect("all are there");
                (*name).to_string()
            }
            Value::Switch(is_on) => if *is_on { "on" } else { "off" }.to_string(),
        }
    }
}

/// A time in the largest unit of which it is a multiple.
fn span_text(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "min")];
    let (unit, name) = units.into_iter().find(|(unit, _)| seconds.is_multiple_of(*unit)).unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        for key in KEYS {
            assert!(key.name.split('.').count() == 2, "{}: every key is in a section", key.name);
            assert!(key.brief.ends_with('.') && key.more.ends_with('.'), "{}", key.name);
            for text in [key.default, key.example].into_iter().filter(|text| !text.is_empty()) {
                let value = key.kind.parse(text).unwrap();
                assert_eq!(value.text(), text, "{}: it is told as it is written", key.name);
                (key.put)(&mut HostSettings::default(), value);
            }
        }
        let sections: Vec<&str> = KEYS.iter().map(Key::section).collect();
        let mut sorted = sections.clone();
        sorted.dedup();
        let distinct: std::collections::BTreeSet<&str> = sections.iter().copied().collect();
        assert_eq!(sorted.len(), distinct.len(), "keys of a section stand together");
    }

    #[test]
    fn a_node_without_a_file_has_the_default() {
        let key = KEYS.iter().find(|key| key.name == "cache.reads").unwrap();
        assert_eq!(key.kind.parse(key.default), Ok(Value::Share(READ_CACHE_PERCENT)));
    }

    #[test]
    fn values_are_checked() {
        let size = Kind::Size(MIB, 10 * MIB);
        assert_eq!(size.parse("2 MiB"), Ok(Value::Size(Size(2 * MIB))));
        assert!(size.parse("2 GiB").unwrap_err().contains("from 1 MiB to 10 MiB"));
        assert!(size.parse("much").unwrap_err().contains("8GiB"));
        let span = Kind::Span(1, 3600);
        for (text, seconds) in [("10 min", 600), ("10m", 600), ("90 s", 90), ("1h", 3600)] {
            assert_eq!(span.parse(text), Ok(Value::Span(Duration::from_secs(seconds))), "{text}");
        }
        assert!(span.parse("2 d").unwrap_err().contains("from 1 s to 1 h"));
        assert!(span.parse("soon").is_err() && span.parse("0 s").is_err());
        assert_eq!(Kind::Share(50).parse("25%"), Ok(Value::Share(25)));
        assert!(Kind::Share(50).parse("60 %").unwrap_err().contains("from 1 % to 50 %, or off"));
        assert!(Kind::Share(50).parse("0 %").is_err() && Kind::Share(50).parse("12").is_err());
        assert!(Kind::Isolation.parse("none").unwrap_err().contains("balanced, rate or off"));
        assert!(Kind::Switch.parse("yes").unwrap_err().contains("on or off"));
        assert!(Kind::Address.parse("10.0.0.1").is_err() && Kind::Directory.parse("tls").is_err());
    }
}
