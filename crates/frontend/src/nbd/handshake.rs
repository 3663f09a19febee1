//! Option haggling: from the greeting to an open export, or to the end.
//!
//! Role: answers options one at a time; see [`super`] for the states.
//!
//! Policy where the protocol leaves a choice
//! - A client that doesn't speak the fixed newstyle may only send `EXPORT_NAME`; anything else closes.
//! - An option with too much data is skipped and refused, an unknown one skipped as unsupported, `EXPORT_NAME` closes:
//!   it alone has no way to carry an error.
//! - Queries of unknown namespaces, or of none, select nothing. Metadata contexts belong to the export they were asked
//!   for, by its own name: asking under the empty name and opening by name keeps them.
//! - `NAME`, `DESCRIPTION` and `BLOCK_SIZE` are sent when asked for, a description only where there is one.

#[cfg(test)]
mod tests;

use super::contexts::{self, Context, SELECTED_MAX};
use super::transmission::{PAYLOAD_BYTES_MAX, Terms};
use super::wire::{
    self, ContextRequest, Head, InfoRequest, OptionHeader, STRING_BYTES_MAX, bounded, handshake_flag, info, option,
    put_option_reply, reply, transmission_flag,
};
use super::{Effect, Exports, Outbox, Refusal, RefusalKind, SessionConfig, Step, TlsPolicy, gather};
use holdfast_base::{Buf, ExportInfo};

/// Data that an option may carry: a dozen and more strings of the greatest length.
pub const OPTION_DATA_BYTES_MAX: u32 = 64 << 10;

/// Any byte may be addressed, whole blocks are best; the largest payload is the protocol's own default.
const BLOCK_BYTES_MIN: u32 = 1;
const BLOCK_BYTES_PREFERRED: u32 = holdfast_base::BLOCK_BYTES as u32;

const SHUTTING_DOWN: &str = "the server is shutting down: connect again later";

pub(super) fn greeting() -> Head {
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    Head::new().u64(wire::GREETING_MAGIC).u64(wire::OPTION_MAGIC).u16(flags)
}

#[derive(Debug)]
enum State {
    Flags,
    Options,
    /// The data of an option that is refused, on its way to nowhere.
    Skipping {
        option: u32,
        rest_bytes: u32,
    },
    Opening(Opening),
    Securing,
    /// The option that is gathered names an export that is elsewhere.
    Moving,
}

/// What the client asked with the option that opens an export.
#[derive(Debug)]
struct Opening {
    option: u32,
    export: String,
    wanted: Wanted,
}

#[derive(Clone, Copy, Default, Debug)]
struct Wanted {
    name: bool,
    description: bool,
    block_size: bool,
}

/// What the client has agreed on so far; `STARTTLS` forgets it.
#[derive(Default)]
struct Agreed {
    structured: bool,
    /// The export for which the client selected metadata contexts, and those; their ids are their places, from 1 on.
    contexts_of: Option<String>,
    contexts: Vec<Context>,
}

impl Agreed {
    fn forget_contexts(&mut self) {
        (self.contexts_of, self.contexts) = (None, Vec::new());
    }
}

pub(super) enum Opened {
    Serving(Terms),
    Refused,
    Close,
}

pub(super) struct Handshake {
    state: State,
    /// Bytes of the flags or option being gathered.
    head: Vec<u8>,
    client_flags: u16,
    secured: bool,
    stopping: bool,
    agreed: Agreed,
}

/// Replies to one option, sent as one run of bytes.
struct Answer {
    option: u32,
    bytes: Vec<u8>,
}

impl Answer {
    fn put(&mut self, kind: u32, parts: &[&[u8]]) {
        put_option_reply(&mut self.bytes, self.option, kind, parts);
    }

    fn put_info(&mut self, kind: u16, data: &[u8]) {
        self.put(reply::INFO, &[&kind.to_be_bytes(), data]);
    }
}

/// The last reply to an option.
enum Verdict {
    Ack,
    Error(u32, &'static str),
    /// The export is not for this client.
    Forbidden(String),
}

impl Handshake {
    pub(super) fn new() -> Handshake {
        Handshake {
            state: State::Flags,
            head: Vec::new(),
            client_flags: 0,
            secured: false,
            stopping: false,
            agreed: Agreed::default(),
        }
    }

    pub(super) fn wants_input(&self, may_send: bool) -> bool {
        match self.state {
            State::Opening(_) | State::Securing | State::Moving => false,
            State::Flags | State::Options | State::Skipping { .. } => may_send || !self.head.is_empty(),
        }
    }

    pub(super) fn on_bytes(
        &mut self,
        bytes: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        may_send: bool,
        out: &mut Outbox<'_>,
    ) -> Step {
        match &mut self.state {
            State::Flags => self.on_flag_bytes(bytes),
            State::Options if self.head.is_empty() && !may_send => Step::Waiting,
            State::Options => self.on_option_bytes(bytes, config, exports, out),
            State::Skipping { option, rest_bytes } => {
                let count = bytes.len().min(*rest_bytes as usize);
                *rest_bytes -= count as u32;
                if *rest_bytes == 0 {
                    let option = *option;
                    self.state = State::Options;
                    return self.on_skipped(option, config, out).unwrap_or(Step::Taken(count));
                }
                Step::Taken(count)
            }
            State::Opening(_) | State::Moving => Step::Waiting,
            // Plain bytes behind STARTTLS: see invariant 4 of the session.
            State::Securing => Step::Close,
        }
    }

    fn on_flag_bytes(&mut self, bytes: &[u8]) -> Step {
        let count = gather(&mut self.head, wire::CLIENT_FLAGS_BYTES, bytes);
        let Some(fixed) = self.head.first_chunk() else { return Step::Taken(count) };
        let flags = u32::from_be_bytes(*fixed);
        self.head.clear();
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        match u16::try_from(flags) {
            Ok(flags) if flags & !known == 0 => self.client_flags = flags,
            _ => return Step::Close,
        }
        self.state = State::Options;
        Step::Taken(count)
    }

    fn on_option_bytes(
        &mut self,
        bytes: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        out: &mut Outbox<'_>,
    ) -> Step {
        let mut count = gather(&mut self.head, wire::OPTION_HEADER_BYTES, bytes);
        let Some(fixed) = self.head.first_chunk() else { return Step::Taken(count) };
        let Some(OptionHeader { option, len }) = wire::decode_option(fixed) else { return Step::Close };
        if option != option::EXPORT_NAME && self.client_flags & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Step::Close;
        }
        if len > OPTION_DATA_BYTES_MAX {
            self.head.clear();
            self.state = State::Skipping { option, rest_bytes: len };
            return if option == option::EXPORT_NAME { Step::Close } else { Step::Taken(count) };
        }
        let whole = wire::OPTION_HEADER_BYTES + len as usize;
        count += gather(&mut self.head, whole, &bytes[count..]);
        if self.head.len() < whole {
            return Step::Taken(count);
        }
        self.on_gathered(config, exports, out).unwrap_or(Step::Taken(count))
    }

    /// Answers the option that is gathered, or has the connection go where its export is. Returns a step only where the session
    /// ends.
    fn on_gathered(&mut self, config: &SessionConfig, exports: &dyn Exports, out: &mut Outbox<'_>) -> Option<Step> {
        // The option leaves the gathering place while it is handled, and its memory returns for the next.
        let mut head = std::mem::take(&mut self.head);
        let header = head.first_chunk().and_then(wire::decode_option).expect("its header was read before");
        let data = &head[wire::OPTION_HEADER_BYTES..];
        let named = named_export(header.option, data).filter(|_| !self.must_secure(config) && !self.stopping);
        if let Some(export) = named.filter(|name| exports.is_elsewhere(name)) {
            out.push(Effect::Move { export: export.to_string() });
            self.state = State::Moving;
            self.head = head;
            return None;
        }
        let step = self.on_option(header.option, data, config, exports, out);
        head.clear();
        self.head = head;
        step
    }

    pub(super) fn on_moved(
        &mut self,
        config: &SessionConfig,
        exports: &dyn Exports,
        out: &mut Outbox<'_>,
    ) -> Option<Step> {
        assert!(matches!(self.state, State::Moving), "it moves when the session asks for it");
        self.state = State::Options;
        self.on_gathered(config, exports, out)
    }

    /// Refuses an option whose data was too much to keep. Returns a step only where the session ends.
    fn on_skipped(&mut self, option: u32, config: &SessionConfig, out: &mut Outbox<'_>) -> Option<Step> {
        let verdict = match option {
            option::ABORT => Verdict::Ack,
            _ if self.must_secure(config) && option != option::STARTTLS => tls_required(),
            _ if self.stopping => Verdict::Error(reply::ERR_SHUTDOWN, SHUTTING_DOWN),
            option::LIST
            | option::STARTTLS
            | option::INFO
            | option::GO
            | option::STRUCTURED_REPLY
            | option::LIST_META_CONTEXT
            | option::SET_META_CONTEXT => {
                if option == option::SET_META_CONTEXT {
                    self.agreed.forget_contexts();
                }
                Verdict::Error(reply::ERR_TOO_BIG, "the option carries more data than the server takes")
            }
            _ => unsupported(),
        };
        conclude(Answer { option, bytes: Vec::new() }, verdict, out);
        (option == option::ABORT).then_some(Step::Close)
    }

    /// Answers one option. Returns a step only where the session ends.
    fn on_option(
        &mut self,
        option: u32,
        data: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        out: &mut Outbox<'_>,
    ) -> Option<Step> {
        if option == option::EXPORT_NAME {
            return self.on_export_name(data, config, exports, out).is_none().then_some(Step::Close);
        }
        let mut answer = Answer { option, bytes: Vec::new() };
        let verdict = match option {
            option::ABORT => {
                conclude(answer, Verdict::Ack, out);
                return Some(Step::Close);
            }
            option::STARTTLS => self.on_starttls(data, config),
            _ if self.must_secure(config) => tls_required(),
            _ if self.stopping => Verdict::Error(reply::ERR_SHUTDOWN, SHUTTING_DOWN),
            option::LIST if data.is_empty() => {
                for export in exports.list() {
                    let (name, description) = (bounded(&export.name), bounded(&export.description));
                    let name_len = (name.len() as u32).to_be_bytes();
                    answer.put(reply::SERVER, &[&name_len, name.as_bytes(), description.as_bytes()]);
                }
                Verdict::Ack
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                Verdict::Ack
            }
            option::LIST | option::STRUCTURED_REPLY => {
                Verdict::Error(reply::ERR_INVALID, "this option carries no data")
            }
            option::INFO | option::GO => match self.on_info_or_go(data, config, exports, &mut answer) {
                Some(verdict) => verdict,
                None => {
                    let State::Opening(opening) = &self.state else { unreachable!("just set") };
                    out.push(Effect::Open { export: opening.export.clone() });
                    return None;
                }
            },
            option::LIST_META_CONTEXT => self.on_list_contexts(data, config, exports, &mut answer),
            option::SET_META_CONTEXT => self.on_set_contexts(data, config, exports, &mut answer),
            _ => unsupported(),
        };
        conclude(answer, verdict, out);
        if let State::Securing = self.state {
            out.push(Effect::StartTls);
        }
        None
    }

    fn must_secure(&self, config: &SessionConfig) -> bool {
        config.tls == TlsPolicy::Required && !self.secured
    }

    fn on_starttls(&mut self, data: &[u8], config: &SessionConfig) -> Verdict {
        if self.secured {
            return Verdict::Error(reply::ERR_INVALID, "the connection is secured already");
        }
        if config.tls == TlsPolicy::None {
            return Verdict::Error(reply::ERR_POLICY, "this server is not configured for TLS");
        }
        if !data.is_empty() {
            return Verdict::Error(reply::ERR_INVALID, "this option carries no data");
        }
        if self.stopping {
            return Verdict::Error(reply::ERR_SHUTDOWN, SHUTTING_DOWN);
        }
        self.agreed = Agreed::default();
        self.state = State::Securing;
        Verdict::Ack
    }

    /// `None` where the client can't have what it names: this option knows no error.
    fn on_export_name(
        &mut self,
        data: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        out: &mut Outbox<'_>,
    ) -> Option<()> {
        if self.must_secure(config) || self.stopping || data.len() > STRING_BYTES_MAX {
            return None;
        }
        let export = resolve(std::str::from_utf8(data).ok()?, config, exports).ok()?.name;
        out.push(Effect::Open { export: export.clone() });
        self.state = State::Opening(Opening { option: option::EXPORT_NAME, export, wanted: Wanted::default() });
        Some(())
    }

    /// Answers `INFO`, or refuses either; `None` where the client may go, and the shell is asked.
    fn on_info_or_go(
        &mut self,
        data: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        answer: &mut Answer,
    ) -> Option<Verdict> {
        let Some(request) = InfoRequest::decode(data) else { return Some(malformed()) };
        let export = match resolve(request.name, config, exports) {
            Ok(export) => export,
            Err(verdict) => return Some(verdict),
        };
        let wanted = Wanted {
            name: request.wants(info::NAME),
            description: request.wants(info::DESCRIPTION),
            block_size: request.wants(info::BLOCK_SIZE),
        };
        if answer.option == option::GO {
            self.state = State::Opening(Opening { option: option::GO, export: export.name, wanted });
            return None;
        }
        self.put_infos(answer, &export, wanted);
        Some(Verdict::Ack)
    }

    fn put_infos(&self, answer: &mut Answer, export: &ExportInfo, wanted: Wanted) {
        let size = export.size_bytes.to_be_bytes();
        let flags = self.transmission_flags(export).to_be_bytes();
        answer.put_info(info::EXPORT, &[&size[..], &flags].concat());
        if wanted.name {
            answer.put_info(info::NAME, bounded(&export.name).as_bytes());
        }
        if wanted.description && !export.description.is_empty() {
            answer.put_info(info::DESCRIPTION, bounded(&export.description).as_bytes());
        }
        if wanted.block_size {
            let sizes = [BLOCK_BYTES_MIN, BLOCK_BYTES_PREFERRED, PAYLOAD_BYTES_MAX];
            answer.put_info(info::BLOCK_SIZE, sizes.map(u32::to_be_bytes).as_flattened());
        }
    }

    fn transmission_flags(&self, export: &ExportInfo) -> u16 {
        use transmission_flag as flag;
        // All connections to a volume meet in its one controller, whose every acknowledged write is durable: so FUA
        // costs nothing, and one connection's flush covers all.
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::CAN_MULTI_CONN | flag::SEND_CACHE;
        flags |= if export.read_only {
            flag::READ_ONLY
        } else {
            flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO
        };
        if self.agreed.structured {
            flags |= flag::SEND_DF;
        }
        flags
    }

    fn on_list_contexts(
        &mut self,
        data: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        answer: &mut Answer,
    ) -> Verdict {
        if !self.agreed.structured {
            return needs_structured();
        }
        let Some(request) = ContextRequest::decode(data) else { return malformed() };
        let export = match resolve(request.name, config, exports) {
            Ok(export) => export,
            Err(verdict) => return verdict,
        };
        for name in contexts::listed(request.queries(), &exports.snapshots(&export.name)) {
            answer.put(reply::META_CONTEXT, &[&0u32.to_be_bytes(), name.as_bytes()]);
        }
        Verdict::Ack
    }

    fn on_set_contexts(
        &mut self,
        data: &[u8],
        config: &SessionConfig,
        exports: &dyn Exports,
        answer: &mut Answer,
    ) -> Verdict {
        // Also a request that fails replaces what was selected before.
        self.agreed.forget_contexts();
        if !self.agreed.structured {
            return needs_structured();
        }
        let Some(request) = ContextRequest::decode(data) else { return malformed() };
        let export = match resolve(request.name, config, exports) {
            Ok(export) => export,
            Err(verdict) => return verdict,
        };
        let snapshots = exports.snapshots(&export.name);
        for query in request.queries() {
            let Some(context) = contexts::named(query, &snapshots) else { continue };
            if !self.agreed.contexts.contains(&context) && self.agreed.contexts.len() < SELECTED_MAX {
                self.agreed.contexts.push(context);
                let id = self.agreed.contexts.len() as u32;
                answer.put(reply::META_CONTEXT, &[&id.to_be_bytes(), query.as_bytes()]);
            }
        }
        self.agreed.contexts_of = Some(export.name);
        Verdict::Ack
    }

    pub(super) fn on_opened(&mut self, result: Result<ExportInfo, Refusal>, out: &mut Outbox<'_>) -> Opened {
        let state = std::mem::replace(&mut self.state, State::Options);
        let State::Opening(opening) = state else { panic!("no export was being opened") };
        let result = match result {
            Ok(_) if self.stopping => {
                Err(Refusal { kind: RefusalKind::ShuttingDown, message: SHUTTING_DOWN.to_owned() })
            }
            result => result,
        };
        let mut answer = Answer { option: opening.option, bytes: Vec::new() };
        match (opening.option, result) {
            (option::EXPORT_NAME, Ok(export)) => {
                out.send(Head::new().u64(export.size_bytes).u16(self.transmission_flags(&export)));
                if self.client_flags & handshake_flag::NO_ZEROES == 0 {
                    out.send_buf(Buf::zeroes(wire::EXPORT_NAME_PADDING_BYTES));
                }
                Opened::Serving(self.terms(&opening.export, &export))
            }
            (option::EXPORT_NAME, Err(_)) => Opened::Close,
            (_, Ok(export)) => {
                self.put_infos(&mut answer, &export, opening.wanted);
                conclude(answer, Verdict::Ack, out);
                Opened::Serving(self.terms(&opening.export, &export))
            }
            (_, Err(refusal)) => {
                answer.put(refusal_reply(refusal.kind), &[bounded(&refusal.message).as_bytes()]);
                out.send_buf(Buf::copy_from(&answer.bytes));
                Opened::Refused
            }
        }
    }

    fn terms(&self, opened_as: &str, export: &ExportInfo) -> Terms {
        let is_selected = self.agreed.contexts_of.as_deref() == Some(opened_as);
        Terms {
            size_bytes: export.size_bytes,
            read_only: export.read_only,
            structured: self.agreed.structured,
            contexts: if is_selected { self.agreed.contexts.clone() } else { Vec::new() },
        }
    }

    pub(super) fn on_tls_started(&mut self) {
        assert!(matches!(self.state, State::Securing), "TLS starts when the session asks for it");
        self.secured = true;
        self.state = State::Options;
    }

    pub(super) fn on_shutdown(&mut self) {
        self.stopping = true;
    }
}

/// The export that an option names; options without one, and broken ones, have none.
fn named_export(option: u32, data: &[u8]) -> Option<&str> {
    let name = match option {
        option::EXPORT_NAME => data,
        option::INFO | option::GO | option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
            let (len, rest) = data.split_first_chunk()?;
            rest.get(..u32::from_be_bytes(*len) as usize)?
        }
        _ => return None,
    };
    std::str::from_utf8(name).ok()
}

/// The export that a client's name stands for, or why the client can't have it.
fn resolve(name: &str, config: &SessionConfig, exports: &dyn Exports) -> Result<ExportInfo, Verdict> {
    if let Some(message) = exports.refusal(name) {
        return Err(Verdict::Forbidden(message));
    }
    let found = exports.find(name).or_else(|| match &config.default_export {
        _ if !name.is_empty() => None,
        Some(default) => exports.find(default),
        None => {
            let mut all = exports.list();
            if all.len() == 1 { all.pop() } else { None }
        }
    });
    found.ok_or_else(unknown_export)
}

fn conclude(mut answer: Answer, verdict: Verdict, out: &mut Outbox<'_>) {
    match verdict {
        Verdict::Ack => answer.put(reply::ACK, &[]),
        Verdict::Error(kind, text) => answer.put(kind, &[text.as_bytes()]),
        Verdict::Forbidden(message) => answer.put(reply::ERR_POLICY, &[bounded(&message).as_bytes()]),
    }
    out.send_buf(Buf::copy_from(&answer.bytes));
}

fn refusal_reply(kind: RefusalKind) -> u32 {
    match kind {
        RefusalKind::Unknown => reply::ERR_UNKNOWN,
        RefusalKind::Forbidden => reply::ERR_POLICY,
        RefusalKind::ShuttingDown => reply::ERR_SHUTDOWN,
    }
}

fn unsupported() -> Verdict {
    Verdict::Error(reply::ERR_UNSUP, "the server does not know this option")
}

fn tls_required() -> Verdict {
    Verdict::Error(reply::ERR_TLS_REQD, "this server serves secured connections only: start TLS first")
}

fn malformed() -> Verdict {
    Verdict::Error(reply::ERR_INVALID, "the option's data does not have the form it must have")
}

fn unknown_export() -> Verdict {
    Verdict::Error(reply::ERR_UNKNOWN, "there is no such export: list the exports to see their names")
}

fn needs_structured() -> Verdict {
    Verdict::Error(reply::ERR_INVALID, "metadata contexts need structured replies: negotiate those first")
}
