// Makes the gRPC calls that drivers.py writes to stdin, with @grpc/grpc-js, and writes their outcomes
// to stdout. Messages are base64; proto-loader decodes and encodes them in both directions.
"use strict";

const fs = require("node:fs");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const GZIP = 2;
const ANY_SIZE = { "grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1 };

function metadataOf(asked) {
  const metadata = new grpc.Metadata();
  for (const [name, value] of Object.entries(asked.metadata)) metadata.set(name, value);
  return metadata;
}

function optionsOf(asked) {
  return asked.timeout_ms === null ? {} : { deadline: Date.now() + asked.timeout_ms };
}

function ended(answers, status, method) {
  const trailers = {};
  for (const [name, value] of Object.entries(status.metadata.getMap())) trailers[name] = String(value);
  return {
    answers: answers.map((one) => method.responseSerialize(one).toString("base64")),
    code: status.code,
    message: status.details,
    trailers,
  };
}

function unary(client, name, method, asked) {
  return new Promise((resolve) => {
    const answers = [];
    const request = method.requestDeserialize(Buffer.from(asked.requests[0], "base64"));
    const call = client[name](request, metadataOf(asked), optionsOf(asked), (_, answer) => {
      if (answer !== undefined) answers.push(answer);
    });
    call.on("status", (status) => setImmediate(() => resolve(ended(answers, status, method))));
    if (asked.cancel) call.cancel();
  });
}

// With in_turns a request waits for the previous response. A cancelled stream ends at its first
// response.
function stream(client, name, method, asked) {
  return new Promise((resolve) => {
    const answers = [];
    const waiting = asked.requests.map((one) => method.requestDeserialize(Buffer.from(one, "base64")));
    const call = client[name](metadataOf(asked), optionsOf(asked));
    const send = (count) => {
      for (const request of waiting.splice(0, count)) call.write(request);
      if (waiting.length === 0 && !asked.cancel) call.end();
    };
    call.on("data", (answer) => {
      answers.push(answer);
      if (asked.cancel) call.cancel();
      else if (asked.in_turns) send(1);
    });
    call.on("error", () => {});
    call.on("status", (status) => resolve(ended(answers, status, method)));
    send(asked.in_turns ? 1 : waiting.length);
  });
}

// Uses TLS if the environment names PEM files.
function credentials() {
  const { TLS_CA, TLS_CERT, TLS_KEY } = process.env;
  if (TLS_CA === undefined) return grpc.credentials.createInsecure();
  return grpc.credentials.createSsl(...[TLS_CA, TLS_KEY, TLS_CERT].map((path) => fs.readFileSync(path)));
}

async function main() {
  const [target, proto] = process.argv.slice(2);
  const input = JSON.parse(fs.readFileSync(0, "utf8"));
  const definition = protoLoader.loadSync(proto, { keepCase: true, longs: String });
  const methods = definition["embedserve.v1.EmbeddingService"];
  const Client = grpc.makeGenericClientConstructor(methods, "EmbeddingService");
  const compression = input.gzip ? { "grpc.default_compression_algorithm": GZIP } : {};
  const client = new Client(target, credentials(), { ...ANY_SIZE, ...compression });
  const results = await Promise.all(
    input.calls.map((asked) => {
      const method = methods[asked.method];
      return (method.requestStream ? stream : unary)(client, asked.method, method, asked);
    }),
  );
  client.close();
  process.stdout.write(JSON.stringify(results));
}

main();
